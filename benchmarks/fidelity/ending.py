# SPDX-License-Identifier: Apache-2.0
"""A task in which half of the gradients of every block end.

Exact moments decay to zero and the weights come to rest.  A rounded m whose decay is less than half
a code stays where it is, while v goes on to decay: u = m/sqrt(v) then grows up to its bound.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from benchmarks.fidelity.training import Task

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
