# SPDX-License-Identifier: Apache-2.0
"""The tasks of the settings: models and their data."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fidelity.training import Task
from examples.gpt.model import GPT, GPTConfig, Text, load_text, train_batch, validation_windows

VALIDATION_WINDOWS = 512
PRUNED_MATRIX = "blocks.0.mlp.0.weight"
PRUNED_EVERY = 16


@cache
def _corpus() -> Text:
    return load_text(None)


@dataclass(frozen=True)
class TextTask(Task):
    """Predict the next byte of the standard library's sources: the main measurement.

    The windows are shorter than the model's context, so that the last position rows never get a
    gradient; every 16th column of one matrix is treated as pruned.
    """

    config: GPTConfig = GPTConfig(context=64, width=256, layers=2, heads=4)
    window: int = 48
    batch_size: int = 6

    def make_model(self) -> nn.Module:
        """Return the GPT."""
        return GPT(self.config)

    def batch(self, seed: int, step: int) -> tuple[Tensor]:
        """Return random windows of the training text."""
        text = _corpus().train
        return (train_batch(text, self.batch_size, self.window, seed=seed, step=step, rank=0),)

    def mark_untrained(self, marks: dict[str, Tensor]) -> None:
        """Mark the position rows beyond the window, and the pruned columns."""
        marks["position_embedding.weight"][self.window :] = True
        marks[PRUNED_MATRIX][:, ::PRUNED_EVERY] = True

    @torch.no_grad()
    def validation_loss(self, model: nn.Module) -> float:
        """Return the mean loss on windows spread over the validation text, nats per byte."""
        windows = validation_windows(_corpus().validation, VALIDATION_WINDOWS, self.window)
        total = sum(model(batch).item() * len(batch) for batch in windows.split(64))
        return total / len(windows)


CLASSES, CHANNELS, SIZE = 10, 3, 16
# So many labels are drawn at random, which keeps gradients alive once the classes are learnt.
MISLABELLED = 0.1
VALIDATION_SEED, VALIDATION_EXAMPLES = 1_000_000, 2048


class Classifier(nn.Module):
    """Layers whose outputs are the logits of classes; forward returns the loss."""

    def __init__(self, *layers: nn.Module):
        """Take the layers."""
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the labels."""
        return F.cross_entropy(self.layers(inputs), labels)


def labelled(seed: int, step: int, count: int) -> tuple[Tensor, Tensor]:
    """Return images [count, channels, size, size] and their labels [count], int64."""
    shape = CLASSES, CHANNELS, 4, 4
    coarse = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    templates = F.interpolate(torch.from_numpy(coarse), size=(SIZE, SIZE), mode="bilinear")
    generator = np.random.default_rng((seed, step))
    classes = generator.integers(0, CLASSES, count)
    shifts = generator.integers(0, SIZE, (count, 2))
    noise = generator.standard_normal((count, CHANNELS, SIZE, SIZE), dtype=np.float32)
    wrong = generator.random(count) < MISLABELLED
    labels = np.where(wrong, generator.integers(0, CLASSES, count), classes)
    pairs = zip(classes.tolist(), shifts.tolist(), strict=True)
    moved = [templates[kind].roll(tuple(shift), dims=(1, 2)) for kind, shift in pairs]
    return torch.stack(moved) + torch.from_numpy(noise), torch.from_numpy(labels)


@dataclass(frozen=True)
class ImageTask(Task):
    """Tell classes of smooth random images apart, shifted, noisy and mislabelled: convolutions."""

    batch_size: int = 32

    def make_model(self) -> nn.Module:
        """Return four 3 x 3 convolutions and a linear layer."""
        widths = (CHANNELS, 32, 64, 64, 128)
        layers: list[nn.Module] = []
        for number in range(4):
            layers += [nn.Conv2d(*widths[number : number + 2], 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if number < 2 else []
        end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES)
        return Classifier(*layers, *end)

    def batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return images and labels."""
        return labelled(seed, step, self.batch_size)

    def mark_untrained(self, marks: dict[str, Tensor]) -> None:
        """Mark every 16th input channel of the third convolution, which is treated as pruned."""
        marks["layers.6.weight"][:, ::PRUNED_EVERY] = True

    @torch.no_grad()
    def validation_loss(self, model: nn.Module) -> float:
        """Return the mean loss on new examples, a tenth of them mislabelled as in training."""
        return model(*labelled(VALIDATION_SEED, 0, VALIDATION_EXAMPLES)).item()


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
    """Predict the next token: rare rows of the embedding get a gradient every few hundred steps."""

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


SHAPE = (64, 256)


class Linear(nn.Module):
    """One matrix, whose gradient is the input."""

    def __init__(self):
        """Make the matrix."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE))

    def forward(self, grad: Tensor) -> Tensor:
        """Return the sum of products."""
        return (self.weight * grad).sum()


@dataclass(frozen=True)
class EndingTask(Task):
    """Normal gradients, of which every other column ends.

    Exact moments decay to zero and the weights come to rest.  A rounded m whose decay is less than
    half a code stays where it is, while v goes on to decay: u = m/sqrt(v) then grows up to its
    bound.

    Attributes:
        compared: the columns that end.
        last: the steps that they have a gradient.
    """

    compared: ClassVar[slice] = slice(None, None, 2)
    last: int = 600

    def make_model(self) -> nn.Module:
        """Return the matrix."""
        return Linear()

    def batch(self, seed: int, step: int) -> tuple[Tensor]:
        """Return the gradient of a step."""
        grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
        if step >= self.last:
            grad[:, ::2] = 0.0
        return (grad,)
