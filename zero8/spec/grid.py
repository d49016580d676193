# SPDX-License-Identifier: Apache-2.0
"""The block grid: which elements of a parameter share one scale.

The grid is a pure function of the parameter's global shape, never of the shard: ranks that hold
different pieces of one parameter agree on every block without talking to each other, and a
checkpoint read at another world size finds the same blocks.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_ROW_LENGTH = 64
"""Rows shorter than this have no grid: the scales would cost more than the codes save."""

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 64, 4096

MAX_NUMEL = 2**48
"""More elements than any memory holds; sums and products of sizes below it fit 64 bits."""


def check_block_size(block_size: int) -> int:
    """Return `block_size` if it is a power of two in 64..4096, else raise ValueError."""
    valid = isinstance(block_size, int) and not isinstance(block_size, bool)
    valid = valid and MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE
    if not valid or block_size & (block_size - 1):
        raise ValueError(
            f"block_size: got {block_size!r}, expected a power of two from {MIN_BLOCK_SIZE} to "
            f"{MAX_BLOCK_SIZE}; 256 is the default"
        )
    return block_size


@dataclass(frozen=True)
class BlockGrid:
    """Blocks of at most `block_size` elements that run inside the rows of a parameter.

    A row is `row_length` consecutive elements of the parameter in row-major order; the last block
    of a row may be short, so no block crosses a row.
    """

    num_rows: int
    row_length: int
    block_size: int

    @classmethod
    def of(cls, shape: tuple[int, ...], block_size: int) -> "BlockGrid | None":
        """Return the grid of a parameter of global `shape`, or None where it has none.

        Keeps k >= 1 leading dimensions, k the largest that leaves a row (the product of the other
        dimensions) of at least 64 elements.  None if even `shape[1:]` has fewer.
        """
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

    def num_blocks_touched(self, first: int, numel: int) -> int:
        """Return how many blocks the elements `first .. first + numel - 1` touch."""
        if numel == 0:
            return 0
        return self.block_of(first + numel - 1) - self.block_of(first) + 1

    def block_numbers(self, first: int, numel: int, device="cpu") -> tuple[Tensor, int]:
        """Return the block of each element `first .. first + numel - 1`, and how many there are.

        Blocks are counted from the one that holds `first`; shape (numel,), int64.
        """
        index = torch.arange(first, first + numel, dtype=torch.int64, device=device)
        row, column = index // self.row_length, index % self.row_length
        block = row * self.blocks_per_row + column // self.block_size
        return block - self.block_of(first), self.num_blocks_touched(first, numel)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a whole parameter: `shape[:k] + (blocks_per_row,)`."""
        kept = max(k for k in range(1, len(shape)) if math.prod(shape[k:]) == self.row_length)
        return (*shape[:kept], self.blocks_per_row)
