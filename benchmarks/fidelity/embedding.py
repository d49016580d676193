# SPDX-License-Identifier: Apache-2.0
"""A task with a large embedding table whose rare rows get a gradient every few hundred steps."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.fidelity.images import Classifier
from benchmarks.fidelity.training import Task

VOCABULARY = 4096
# Ids at the end of the vocabulary that never occur, as tokenizers reserve them.
RESERVED = 64
WIDTH = 64
USED = VOCABULARY - RESERVED
FREQUENCIES = 1.0 / np.arange(1, USED + 1)
FREQUENCIES /= FREQUENCIES.sum()
"""Zipf's law: token number k has a probability proportional to 1/(k+1)."""


@dataclass(frozen=True)
class EmbeddingTask(Task):
    """Predict the next token."""

    batch_size: int = 256

    def make_model(self) -> nn.Module:
        """Return an embedding, an MLP and an untied output matrix."""
        hidden = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        embedding = nn.Embedding(VOCABULARY, WIDTH)
        for layer in (embedding, output):
            nn.init.normal_(layer.weight, std=0.02)
        return Classifier(embedding, nn.LayerNorm(WIDTH), *hidden, nn.LayerNorm(WIDTH), output)

    def batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens and what follows each, int64 [batch_size].

        In half of all cases the token before it in frequency follows, else any token.
        """
        generator = np.random.default_rng((seed, step))
        tokens, others = generator.choice(USED, (2, self.batch_size), p=FREQUENCIES)
        is_neighbour = generator.random(self.batch_size) < 0.5
        following = np.where(is_neighbour, (tokens - 1) % USED, others)
        return torch.from_numpy(tokens), torch.from_numpy(following)

    def mark_untrained(self, marks: dict[str, Tensor]) -> None:
        """Mark the embeddings of the reserved ids."""
        marks["layers.0.weight"][-RESERVED:] = True
