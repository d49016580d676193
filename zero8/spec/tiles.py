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
    assert not grid.own_row_length, "narrow rows have no tiles"
    index = torch.arange(first, first + numel, dtype=torch.int64, device=device)
    block, num_blocks = grid.block_numbers(first, numel, device)
    number = torch.arange(num_blocks, device=device) + (grid.block_of(first) if numel else 0)
    row, in_row = number // grid.blocks_per_row, number % grid.blocks_per_row
    begin = row * grid.row_length + in_row * grid.block_size
    end = torch.minimum(begin + grid.block_size, (row + 1) * grid.row_length)
    is_whole = (begin >= first) & (end <= first + numel)

    # Cut blocks, at most the first one and the last one, come behind all bands.
    band = torch.where(is_whole, row // ROWS_PER_BAND, grid.num_rows + number)
    _, tile = torch.unique(band * grid.blocks_per_row + in_row, return_inverse=True)
    num_tiles = int(tile.max()) + 1 if numel else 0
    top = torch.full((num_tiles,), grid.num_rows, device=device)
    top = top.scatter_reduce(0, tile, row, "amin")[tile]
    rows = torch.bincount(tile, minlength=num_tiles)[tile]
    shared = torch.where(is_whole, _columns_per_code(rows, end - begin), COLUMNS_PER_BYTE)

    column = index - begin[block]
    code = column // shared[block]
    bytes_per_row = (-(-(end - begin) // COLUMNS_PER_BYTE))[block]
    row_of_byte = torch.where(is_whole[block], top[block] + code // bytes_per_row, row[block])
    unit = torch.where(is_whole[block], code % bytes_per_row, code)
    unit += in_row[block] * (grid.block_size // COLUMNS_PER_BYTE)
    first_unit = grid.unit_of(first, BITS) if numel else 0
    byte = row_of_byte * grid.units_per_row(BITS) + unit - first_unit
    num_bytes = grid.num_bytes(first, numel, BITS)
    return Tiles(tile, row - top, byte, column % shared[block], shared, num_bytes)


def _columns_per_code(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the fewest columns, a power of 2, that must share a code in tiles of these sizes."""
    num_bytes, shared = rows * -(-columns // COLUMNS_PER_BYTE), torch.ones_like(rows)
    while (too_few := num_bytes * shared < columns).any():
        shared = torch.where(too_few, 2 * shared, shared)
    return shared
