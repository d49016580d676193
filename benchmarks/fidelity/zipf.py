# SPDX-License-Identifier: Apache-2.0
"""A task with a large embedding table whose rare rows get a gradient every few hundred steps."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 4096
# Ids at the end of the vocabulary that never occur, as tokenizers reserve them.
RESERVED = 64
WIDTH = 64


@cache
def frequencies() -> np.ndarray:
    """Return Zipf's law: token number k has probability proportional to 1/(k+1)."""
    weights = 1.0 / np.arange(1, VOCABULARY - RESERVED + 1)
    return weights / weights.sum()


@cache
def successors() -> np.ndarray:
    """Return the likeliest successor of each token, one of about its own frequency.

    A permutation inside [2^j, 2^(j+1)) - 1 for every j, so that tokens remain Zipf-distributed.
    """
    ranks = np.arange(1, VOCABULARY - RESERVED + 1)
    generator = np.random.default_rng(0)
    octaves = np.split(ranks, np.flatnonzero(np.diff(np.floor(np.log2(ranks)))) + 1)
    return np.concatenate([generator.permutation(octave) for octave in octaves]) - 1


def transitions(seed: int, step: int, count: int) -> tuple[Tensor, Tensor]:
    """Return tokens and what follows each, int64 [count].

    A Markov chain: the next token is the likeliest successor in half of all cases, and any token
    in the others.
    """
    generator = np.random.default_rng((seed, step))
    tokens, others = generator.choice(frequencies().size, (2, count), p=frequencies())
    followed = generator.random(count) < 0.5
    following = np.where(followed, successors()[tokens], others)
    return torch.from_numpy(tokens), torch.from_numpy(following)


class BigramModel(nn.Module):
    """Embedding, one residual MLP, untied output matrix; forward returns the loss."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for matrix in (self.embedding.weight, self.output.weight):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """Return the mean cross-entropy of the following tokens."""
        x = self.embedding(tokens)
        return F.cross_entropy(self.output(self.norm(x + self.mlp(x))), following)


@dataclass(frozen=True)
class ZipfTask:
    """Predict the next token; see `benchmarks.fidelity.training.Task`."""

    batch_size: int = 256

    def make_model(self) -> nn.Module:
        """Return the model."""
        return BigramModel()

    def batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens and their followers."""
        return transitions(seed, step, self.batch_size)

    def mark_untrained(self, marks: dict[str, Tensor]) -> None:
        """Mark the embeddings of the reserved ids."""
        marks["embedding.weight"][-RESERVED:] = True
