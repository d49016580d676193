# SPDX-License-Identifier: Apache-2.0
"""Tiles: rows by columns of a parameter whose elements share codes.

A band is 64 consecutive rows of the block grid; the last one may have fewer.  A tile is the blocks
of a band that stand below each other: up to 64 rows by the columns of a block.  In a shard it is
those of the rows whose block the shard holds whole; a block that the shard's boundary cuts is a
tile of one row.

Each row of a tile of R rows and C columns has a byte for every 64 columns, so the tile has
R * ceil(C / 64) bytes.  They hold the codes of its columns, from the first byte of the first row
on.  1, 2, 4, ... neighbouring columns share a code, the fewest for which the bytes suffice; in the
part of a block that a boundary cuts, those of each byte do.  What is left of the bytes is 0.

So all codes lie where their rows do: shards that meet between two bands hold the same tiles as the
whole parameter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zero8.spec.grid import UNITS, BlockGrid

ROWS_PER_BAND = 64
BITS = 1 / 8
"""Of a code, for each element."""
COLUMNS_PER_BYTE = UNITS[BITS].numel


@dataclass(frozen=True)
class Tiles:
    """The tiles of elements `first .. first + numel - 1` of a parameter without narrow rows.

    Attributes:
        tile: (blocks touched,) int64, the tile of each block, from 0.
        row: (blocks touched,) int64, its row in the tile.
        byte: (numel,) int64, the byte of each element's code among those of the shard.
        column: (numel,) int64, its column among those that share the code, below 64.
        shared: (blocks touched,) int64, how many columns of the block share a code, unless the end
            of the block, or of the shard, leaves fewer.
        num_bytes: number of bytes.
    """

    tile: Tensor
    row: Tensor
    byte: Tensor
    column: Tensor
    shared: Tensor
    num_bytes: int

    @property
    def num_tiles(self) -> int:
        """Number of tiles."""
        return int(self.tile.max()) + 1 if self.tile.numel() else 0

    def any_of_tile(self, of_blocks: Tensor) -> Tensor:
        """Return, for each block, whether a bool is set for any block of its tile."""
        counts = torch.zeros(self.num_tiles, dtype=torch.int64, device=of_blocks.device)
        return counts.index_add_(0, self.tile, of_blocks.to(torch.int64))[self.tile] > 0


def tiles_of(grid: BlockGrid, first: int, numel: int, device: torch.device | str = "cpu") -> Tiles:
    """Return the tiles of a shard: elements `first .. first + numel - 1` of a parameter."""
    blocks = _Blocks.of(grid, (first, numel), (first, numel), device)
    byte, column = blocks.places()
    # Blocks that are cut, at most the first one and the last one, come behind all others.
    band = torch.where(blocks.is_whole, blocks.row // ROWS_PER_BAND, grid.num_rows + blocks.row)
    _, tile = torch.unique(band * grid.blocks_per_row + blocks.in_row, return_inverse=True)
    num_bytes = grid.num_bytes(first, numel, BITS)
    return Tiles(tile, blocks.row - blocks.top, byte, column, blocks.shared, num_bytes)


def bytes_of_codes(
    grid: BlockGrid,
    shard: tuple[int, int],
    first: int,
    numel: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the byte of each element's code among those of a shard; (numel,) int64.

    Args:
        grid: the parameter's.
        shard: its first element in the parameter, and its number of elements.
        first: the first of these elements in the parameter, one of the shard's.
        numel: the number of these elements.
        device: the device of the result.
    """
    return _Blocks.of(grid, shard, (first, numel), device).places()[0]


@dataclass(frozen=True)
class _Blocks:
    """The blocks of some elements of a shard.

    Attributes:
        grid: the parameter's.
        shard: its first element in the parameter, and its number of elements.
        index: (numel,) int64, the elements in the parameter.
        block: (numel,) int64, the block of each, from 0.
        row: (blocks,) int64, the row of each block.
        in_row: (blocks,) int64, its number in the row.
        is_whole: (blocks,) bool, whether the shard has all of it.
        top: (blocks,) int64, the first row of its tile.
        shared: see `Tiles`.
    """

    grid: BlockGrid
    shard: tuple[int, int]
    index: Tensor
    block: Tensor
    row: Tensor
    in_row: Tensor
    is_whole: Tensor
    top: Tensor
    shared: Tensor

    @classmethod
    def of(
        cls,
        grid: BlockGrid,
        shard: tuple[int, int],
        elements: tuple[int, int],
        device: torch.device | str,
    ) -> "_Blocks":
        """Return the blocks of elements, given by the first one and their number."""
        assert not grid.own_row_length, "narrow rows have no tiles"
        first, numel = elements
        block, num_blocks = grid.block_numbers(first, numel, device)
        number = torch.arange(num_blocks, device=device) + (grid.block_of(first) if numel else 0)
        row, in_row = number // grid.blocks_per_row, number % grid.blocks_per_row
        begin, end = _columns_of(grid, in_row)
        # Rows whose block in these columns the shard has whole.
        first_row, first_column = divmod(shard[0], grid.row_length)
        last_row, last_column = divmod(sum(shard) - 1, grid.row_length)
        lowest = first_row + (begin < first_column).to(torch.int64)
        highest = last_row - (end - 1 > last_column).to(torch.int64)
        is_whole = (lowest <= row) & (row <= highest)
        band = row // ROWS_PER_BAND * ROWS_PER_BAND
        top = torch.where(is_whole, lowest.maximum(band), row)
        rows = highest.minimum(band + ROWS_PER_BAND - 1) + 1 - top
        shared = torch.where(is_whole, _columns_per_code(rows, end - begin), COLUMNS_PER_BYTE)
        index = torch.arange(first, first + numel, dtype=torch.int64, device=device)
        return cls(grid, shard, index, block, row, in_row, is_whole, top, shared)

    def places(self) -> tuple[Tensor, Tensor]:
        """Return `byte` and `column` of `Tiles`."""
        grid, at = self.grid, self.block
        begin, end = _columns_of(grid, self.in_row)
        column = self.index % grid.row_length - begin[at]
        shared = self.shared[at]
        code, bytes_per_row = column // shared, (-(-(end - begin) // COLUMNS_PER_BYTE))[at]
        # In a block that is cut, code 1 is that of its second byte, whether that is here or not.
        row = self.top[at] + torch.where(self.is_whole[at], code // bytes_per_row, 0)
        unit = torch.where(self.is_whole[at], code % bytes_per_row, code)
        unit += (begin // COLUMNS_PER_BYTE)[at]
        first_unit = grid.unit_of(self.shard[0], BITS)
        return row * grid.units_per_row(BITS) + unit - first_unit, column % shared


def _columns_of(grid: BlockGrid, in_row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first column of blocks, by their numbers in the row, and the one behind them."""
    begin = in_row * grid.block_size
    return begin, (begin + grid.block_size).clamp(max=grid.row_length)


def _columns_per_code(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the fewest columns, a power of 2, that must share a code in tiles of these sizes."""
    num_bytes, shared = rows * -(-columns // COLUMNS_PER_BYTE), torch.ones_like(rows)
    while (too_few := (num_bytes > 0) & (num_bytes * shared < columns)).any():
        shared = torch.where(too_few, 2 * shared, shared)
    return shared
