# SPDX-License-Identifier: Apache-2.0
"""The task of the main measurement: a small GPT on the standard library's sources."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from benchmarks.fidelity.training import Task
from examples.gpt.model import (
    GPT,
    GPTConfig,
    Text,
    load_text,
    train_batch,
    validation_windows,
)

VALIDATION_WINDOWS = 512
PRUNED_MATRIX = "blocks.0.mlp.0.weight"
PRUNED_EVERY = 16


@cache
def _corpus() -> Text:
    return load_text(None)


@dataclass(frozen=True)
class TextTask(Task):
    """Predict the next byte.

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
