# SPDX-License-Identifier: Apache-2.0
"""The gradients of several ranks, which one process computes one after the other."""

import torch
from torch import Tensor

from benchmarks.fidelity.text import TextTask
from benchmarks.fidelity.training import TrainingRun
from benchmarks.low_bit.linear import BLOCK_SIZE
from examples.gpt.model import GPTConfig

RANKS = 4
TASK = TextTask(GPTConfig(context=64, width=128, layers=2, heads=4), batch_size=2 * RANKS)
"""The demonstration's GPT in small; each rank has two of a batch's windows."""


class RankGradients:
    """A model's gradients in one flat buffer, as reductions by buckets have them.

    The buffer is padded by zeros to whole blocks.
    """

    def __init__(self, run: TrainingRun):
        """Make the buffer and let the model's parameters use it as their `grad`."""
        self._run = run
        params = list(run.model.parameters())
        sizes = [p.numel() for p in params]
        self._flat = torch.zeros(-(-sum(sizes) // BLOCK_SIZE) * BLOCK_SIZE)
        for p, part in zip(params, self._flat[: sum(sizes)].split(sizes), strict=True):
            p.grad = part.view_as(p)
        self._ranks = torch.empty(RANKS, self._flat.numel())

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return self._flat.numel()

    def next(self, step: int) -> Tensor:
        """Return the gradients of all ranks at a step, (RANKS, numel) float32, valid until next."""
        recipe = self._run.recipe
        (windows,) = recipe.task.batch(recipe.seed, step)
        for mine, grad in zip(windows.chunk(RANKS), self._ranks, strict=True):
            self._flat.zero_()
            self._run.model(mine).backward()
            grad.copy_(self._flat)
        return self._ranks

    def hand_over(self, average: Tensor) -> None:
        """Give the model's parameters an average as their gradient, clipped."""
        self._flat.copy_(average)
        max_norm = self._run.recipe.max_norm
        torch.nn.utils.clip_grad_norm_(self._run.model.parameters(), max_norm)
