# SPDX-License-Identifier: Apache-2.0
"""The part of a parameter that a rank holds: a box of it, one range of indices per dimension.

The tensors of its state are in the order of its elements, row-major within the box.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from zero8.spec.grid import UNITS, is_narrow
from zero8.state.table import Piece, PieceTable

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of a box, and the index of its first element in each dimension."""


Value = TypeVar("Value", bound=Tensor | float)
NEVER_SHARDED = frozenset((torch.nn.Parameter, Tensor, int, float))
"""Types that are never sharded; tested first, because every step tests many values."""


@dataclass(frozen=True)
class Extent:
    """A box of a parameter; these methods are for plain tensors, a subclass's for sharded ones.

    Attributes:
        shape: the parameter's global shape.
        local_shape: the box's.
        offset: in each dimension, the index of the box's first element in the parameter.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Extent":
        """Return the extent of a whole parameter."""
        return cls(shape, shape, (0,) * len(shape))

    @property
    def box(self) -> Box:
        """The box in the parameter."""
        return self.local_shape, self.offset

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.local_shape)

    def table(self, parameter: Piece) -> PieceTable:
        """Return the segment table of the box of a whole parameter, one piece for each run."""
        pieces = [
            replace(parameter, start=start, numel=numel, first=first)
            for start, numel, first in self._runs()
        ]
        return PieceTable(tuple(pieces), self.numel)

    def code_box(self, piece: Piece, bits: int) -> Box:
        """Return the box of a parameter's codes of so many bits, in its `BlockGrid.code_shape`."""
        if bits == 8:
            return self.box
        if is_narrow(self.shape):
            return (self.local_shape[0], piece.grid.units_per_row(bits)), (self.offset[0], 0)
        return self._box_of_rows(piece, UNITS[bits].numel)

    def scale_box(self, piece: Piece) -> Box:
        """Return the box of the scales of a quantized parameter, in its `BlockGrid.scale_shape`.

        It has the blocks that the box touches; for narrow rows, a range of groups.
        """
        if is_narrow(self.shape):
            first = self.offset[0] * math.prod(self.shape[1:])
            begin = piece.grid.block_of(first) if self.numel else 0
            return (piece.grid.num_blocks_touched(first, self.numel), 1), (begin, 0)
        return self._box_of_rows(piece, piece.block_size)

    def _box_of_rows(self, piece: Piece, size: int) -> Box:
        """Return the box of what each row of a parameter has once for so many elements."""
        kept = len(piece.grid.scale_shape(self.shape)) - 1
        in_row = math.prod(self.shape[kept + 1 :])
        column = self.offset[kept] * in_row
        end = column + self.local_shape[kept] * in_row
        first = column // size
        count = -(-end // size) - first if self.local_shape[kept] else 0
        return (*self.local_shape[:kept], count), (*self.offset[:kept], first)

    def entry(self, local: Tensor, shape: tuple[int, ...], box: Box) -> Tensor:
        """Return a local tensor in the form that it has in the state.

        `shape` is the global one; its dimensions beyond those of the box are not sharded.
        """
        return local.view((*box[0], *shape[len(box[0]) :]))

    def has_form(self, value: Tensor) -> bool:
        """Return whether a tensor of this rank's elements has the form that it has in the state."""
        return tuple(value.shape) == self.local_shape and not hasattr(value, "device_mesh")

    def part_of(self, name: str, saved: Tensor, shape: tuple[int, ...], box: Box) -> Tensor:
        """Return this rank's elements of a loaded tensor, called `name`, whole or sharded.

        `shape` and `box` are as in `entry`.  Raises ValueError if it is unclear which they are.
        """
        return saved.full_tensor() if hasattr(saved, "full_tensor") else saved

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start in the box, numel, first element in the parameter) of all runs."""
        cuts = [d for d, size in enumerate(self.shape) if self.local_shape[d] < size]
        if self.numel == 0 or not cuts:
            yield 0, self.numel, 0
            return
        strides = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        run = math.prod(self.local_shape[cuts[-1] :])
        ranges = zip(self.offset[: cuts[-1]], self.local_shape[: cuts[-1]], strict=True)
        outer = itertools.product(*(range(begin, begin + size) for begin, size in ranges))
        for number, index in enumerate(outer):
            at = (*index, self.offset[cuts[-1]])
            yield number * run, run, sum(map(math.prod, zip(at, strides, strict=False)))


def local(value: Value) -> Value:
    """Return the local tensor of a DTensor, and any other value as it is."""
    if type(value) in NEVER_SHARDED or not hasattr(value, "to_local"):
        return value
    with torch.no_grad():  # autograd must not record it
        here: Value = value.to_local()
    return here


def local_grad(p: Tensor, grad: Tensor) -> Tensor:
    """Return the local tensor of a gradient, redistributed to its parameter's placements."""
    if not hasattr(p, "placements") or not hasattr(grad, "placements"):
        return grad
    ours: Any = p  # a DTensor, as its gradient
    theirs: Any = grad
    if theirs.placements != ours.placements:
        # A collective: with tensor parallelism, all ranks get here.
        grad = theirs.redistribute(ours.device_mesh, ours.placements)
    return local(grad)
