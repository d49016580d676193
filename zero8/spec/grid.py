# SPDX-License-Identifier: Apache-2.0
"""The block grid: which elements of a parameter share one scale.

The grid is a pure function of the parameter's global shape, never of the shard: ranks that hold
different pieces of one parameter agree on every block without communication, and a checkpoint read
at another world size finds the same blocks.

Long rows are cut into blocks; narrow rows, of fewer than 64 elements, are put together: a group of
`block_size // row` consecutive rows is one block.  No block holds part of a narrow row unless a
shard boundary cuts it.

Shards that meet between two blocks (of narrow rows: between two groups) step with the same bits as
one whole tensor.  A block that a shard boundary cuts gets independent scales on each side, so its
codes differ from the whole block's; all other blocks keep their bits.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zero8.spec.shown import shown

MIN_ROW_LENGTH = 64
"""Shorter rows are narrow and share a block: scales of its own for each would cost too much."""

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 64, 4096

MAX_NUMEL = 2**48
"""More elements than any memory holds; sums and products of sizes below it fit 64 bits."""


MAX_DIMS = 64
"""More dimensions than torch works on."""


class Unit(NamedTuple):
    """The codes that lie together in whole bytes."""

    numel: int  # number of codes
    num_bytes: int


UNITS = {8: Unit(1, 1), 6: Unit(4, 3), 4: Unit(2, 1)}
"""By the bits of a code."""


def check_block_size(block_size: int) -> int:
    """Return `block_size` if it is a power of two in 64..4096, else raise ValueError."""
    valid = isinstance(block_size, int) and not isinstance(block_size, bool)
    valid = valid and MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE
    if not valid or block_size & (block_size - 1):
        raise ValueError(
            f"block_size: got {shown(block_size)}, expected a power of two from {MIN_BLOCK_SIZE} "
            f"to {MAX_BLOCK_SIZE}; 256 is the default"
        )
    return block_size


def is_narrow(shape: tuple[int, ...]) -> bool:
    """Return whether the longest rows, those of `shape[1:]`, have 1 to 63 elements."""
    return len(shape) > 1 and 0 < math.prod(shape[1:]) < MIN_ROW_LENGTH


def rows_per_block(shape: tuple[int, ...], block_size: int) -> int:
    """Return how many rows of a parameter of narrow rows make a block."""
    return block_size // math.prod(shape[1:])


@dataclass(frozen=True)
class BlockGrid:
    """Blocks of at most `block_size` elements that run inside the rows of a parameter.

    A row is `row_length` consecutive elements of the parameter in row-major order; the last block
    of a row may be short, so no block crosses a row.  Where the parameter's own rows are narrow, a
    row of the grid is a group of them, which is one block; the last group may be short.
    """

    num_rows: int
    row_length: int  # in elements
    block_size: int
    own_row_length: int = 0  # of the parameter's own rows where they are narrow

    @classmethod
    def of(cls, shape: tuple[int, ...], block_size: int) -> "BlockGrid | None":
        """Return the grid of a parameter of global `shape`, or None if it has none.

        Keeps k >= 1 leading dimensions, k the largest that leaves a row (the product of the other
        dimensions) of at least 64 elements.  Where even `shape[1:]` has fewer, a row of the grid is
        a group of `rows_per_block` of those rows.  None for fewer than 2 dimensions, and for rows
        without elements.
        """
        if is_narrow(shape):
            rows, own = rows_per_block(shape, block_size), math.prod(shape[1:])
            return cls(-(-shape[0] // rows), rows * own, block_size, own)
        for kept in range(len(shape) - 1, 0, -1):
            row_length = math.prod(shape[kept:])
            if row_length >= MIN_ROW_LENGTH:
                return cls(math.prod(shape[:kept]), row_length, block_size)
        return None

    @property
    def blocks_per_row(self) -> int:
        """Number of blocks in one row."""
        return -(-self.row_length // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the whole parameter."""
        return self.num_rows * self.blocks_per_row

    def block_of(self, element: int) -> int:
        """Return the number of the block that holds `element` (an index into the parameter)."""
        row, column = divmod(element, self.row_length)
        return row * self.blocks_per_row + column // self.block_size

    def start_of(self, block: int) -> int:
        """Return the first element of a block."""
        row, in_row = divmod(block, self.blocks_per_row)
        return row * self.row_length + in_row * self.block_size

    def num_blocks_touched(self, first: int, numel: int) -> int:
        """Return how many blocks the elements `first .. first + numel - 1` touch."""
        if numel == 0:
            return 0
        return self.block_of(first + numel - 1) - self.block_of(first) + 1

    # --- The bytes of codes ----------------------------------------------------------------------

    @property
    def code_row_length(self) -> int:
        """Elements of a row that begins with a unit of codes: the parameter's own where narrow."""
        return self.own_row_length or self.row_length

    def unit_of(self, element: int, bits: int) -> int:
        """Return the number of the unit that holds the code of `element`, of so many bits.

        Codes lie in units of whole bytes: `UNITS`.  Each row begins with a unit, also the
        parameter's own where they are narrow; so a block does, too.  Units are numbered through
        the parameter.  A shard has each unit that its elements touch; where its boundary cuts one,
        both sides have one, and the other's codes are 0 there.
        """
        row, column = divmod(element, self.code_row_length)
        return row * self.units_per_row(bits) + column // UNITS[bits].numel

    def units_per_row(self, bits: int) -> int:
        """Return how many units the codes of a row take, of the parameter's own if it is narrow."""
        return -(-self.code_row_length // UNITS[bits].numel)

    def num_bytes(self, first: int, numel: int, bits: int) -> int:
        """Return how many bytes hold the codes of elements `first .. first + numel - 1`."""
        if numel == 0:
            return 0
        units = self.unit_of(first + numel - 1, bits) - self.unit_of(first, bits) + 1
        return units * UNITS[bits].num_bytes

    def code_shape(self, shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
        """Return the shape of the codes of a whole parameter of this `shape`.

        That of the parameter for codes of 8 bits; else `shape[:k] + (units per row, bytes of a
        unit)`, or `(rows, units per row, bytes of a unit)` where rows are narrow.
        """
        if bits == 8:
            return shape
        kept = 1 if is_narrow(shape) else self._kept(shape)
        return (*shape[:kept], self.units_per_row(bits), UNITS[bits].num_bytes)

    def block_numbers(
        self, first: int, numel: int, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, int]:
        """Return the block of each element `first .. first + numel - 1`, and the number of blocks.

        Blocks are counted from the one that holds `first`; shape (numel,), int64.
        """
        index = torch.arange(first, first + numel, dtype=torch.int64, device=device)
        row, column = index // self.row_length, index % self.row_length
        block = row * self.blocks_per_row + column // self.block_size
        return block - self.block_of(first), self.num_blocks_touched(first, numel)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a whole parameter of this `shape`.

        `shape[:k] + (blocks_per_row,)`, or `(number of groups, 1)` where rows are narrow.
        """
        if is_narrow(shape):
            return (self.num_rows, 1)
        return (*shape[: self._kept(shape)], self.blocks_per_row)

    def _kept(self, shape: tuple[int, ...]) -> int:
        """Return how many leading dimensions of a parameter number its rows."""
        return max(k for k in range(1, len(shape)) if math.prod(shape[k:]) == self.row_length)
