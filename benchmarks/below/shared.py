# SPDX-License-Identifier: Apache-2.0
"""AdamW that keeps less of the moments of matrices than a number each.

A `Kept` says what is left of both moments at the end of a step; the step itself has the exact
squares of its own gradients.  Whatever 8-bit states would keep in float32, small matrices and
vectors, is kept whole.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.below.codes import TwelveBitCode
from zero8.algorithms.adam import next_history

MIN_NUMEL = 4096
# An 8-bit m has a code per element and a float32 scale per block of 256.
BYTES_OF_M = 1 + 4 / 256
BYTES_OF_FLOAT = 4


class Kept(Protocol):
    """What is left of the moments of a matrix between two steps."""

    def keep(self, m: Tensor, v: Tensor, step: int) -> None:
        """Replace both moments, float32 of the parameter's shape, by what is left of them."""

    def bytes_of(self, shape: torch.Size) -> float:
        """Return the bytes of the state of a parameter of this shape."""


def parts(x: Tensor, size: int, dim: int) -> list[Tensor]:
    """Return views that cut a dimension in two: those of whole groups of `size`, and of the rest.

    Each has the groups at `dim` and their elements at `dim + 1`.
    """
    whole = x.shape[dim] // size * size
    cut = [x.narrow(dim, 0, whole), x.narrow(dim, whole, x.shape[dim] - whole)]
    return [part.unflatten(dim, (-1, min(size, part.shape[dim]))) for part in cut if part.numel()]


@dataclass(frozen=True)
class Groups:
    """One v for `size` neighbours in a row, their mean; rows of fewer than 64 lie end to end."""

    size: int

    def keep(self, m: Tensor, v: Tensor, step: int) -> None:
        """Replace v by the means of its groups."""
        rows = v.view(1, -1) if v[0].numel() < 64 else v.flatten(1)
        for group in parts(rows, self.size, 1):
            group.copy_(group.mean(2, keepdim=True).expand_as(group))

    def bytes_of(self, shape: torch.Size) -> float:
        """Return the bytes of 8-bit m and of float32 means."""
        return shape.numel() * (BYTES_OF_M + BYTES_OF_FLOAT / self.size)


@dataclass(frozen=True)
class Tiles:
    """v of rank 1 in tiles of `size` rows and columns, as Adafactor's in whole matrices.

        v_ij = row_i * column_j / mean, row and column being the means of those of the tile

    Each factor follows the mean of the squares exactly, as the means of v_ij are row and column.
    """

    size: int

    def keep(self, m: Tensor, v: Tensor, step: int) -> None:
        """Replace v by the products of its tiles' factors."""
        for band in parts(v.flatten(1), self.size, 0):
            for tile in parts(band, self.size, 2):
                row = tile.mean(3, keepdim=True)
                column = tile.mean(1, keepdim=True)
                mean = row.mean(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
                torch.mul(row / mean, column, out=tile)

    def bytes_of(self, shape: torch.Size) -> float:
        """Return the bytes of 8-bit m and of float32 factors."""
        rows, columns = shape[0], shape.numel() // shape[0]
        bands, tiles = -(-rows // self.size), -(-columns // self.size)
        factors = rows * tiles + columns * bands
        return shape.numel() * BYTES_OF_M + BYTES_OF_FLOAT * factors


@dataclass(frozen=True)
class Coded:
    """Both moments in a code of 12 bits."""

    code: TwelveBitCode

    def keep(self, m: Tensor, v: Tensor, step: int) -> None:
        """Replace both by what their codes decode to."""
        blocks = [x.view(-1, self.code.block_size) for x in (m, v)]
        stored = self.code.decode(self.code.encode(*blocks, step))
        for block, decoded in zip(blocks, stored, strict=True):
            block.copy_(decoded)

    def bytes_of(self, shape: torch.Size) -> float:
        """Return the bytes of codes and scales."""
        return shape.numel() * self.code.bytes_per_param


class KeptAdamW(torch.optim.Optimizer):
    """AdamW in float32 whose moments of matrices are, between two steps, what a `Kept` leaves."""

    def __init__(self, params, kept: Kept, betas: tuple[float, float], weight_decay: float):
        """Remember what to keep; states are made by the first step."""
        self._kept, self._history = kept, 0.0
        super().__init__(params, {"lr": 1e-3, "betas": betas, "weight_decay": weight_decay})

    def bytes_per_param(self) -> float:
        """Return the bytes of the states of matrices, over their elements."""
        shapes = [p.shape for group in self.param_groups for p in group["params"] if is_matrix(p)]
        return sum(map(self._kept.bytes_of, shapes)) / sum(shape.numel() for shape in shapes)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Step as AdamW does, |u| clipped at its bound, and keep what is to be kept."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            self._history = next_history(self._history, beta1, beta2)
            for p in group["params"]:
                if p.grad is not None:
                    self._step_of(p, group)

    def _step_of(self, p: Tensor, group: dict) -> None:
        (beta1, beta2), lr, state = group["betas"], group["lr"], self.state[p]
        if not state:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["step"] += 1
        step, m, v = state["step"], state["m"], state["v"]
        m.lerp_(p.grad, 1 - beta1)
        v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        bound = (self._history * correction2) ** 0.5 / correction1
        u = m / correction1 / ((v / correction2).sqrt() + 1e-8)
        p.mul_(1 - lr * group["weight_decay"]).sub_(lr * u.clamp_(-bound, bound))
        if is_matrix(p):
            self._kept.keep(m, v, step)


def is_matrix(p: Tensor) -> bool:
    """Return whether 8-bit states would quantize a parameter."""
    return p.requires_grad and p.dim() > 1 and p.numel() >= MIN_NUMEL
