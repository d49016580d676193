# SPDX-License-Identifier: Apache-2.0
"""v of rank 1 in tiles (`zero8.spec.tiles`): the second moment of `Adam8bitShared`.

    v_ij = row_i * level(code_j)                                                            (C12)

Of new values v' the rows keep the sums, and the columns their shares:

    mean_k  = mean of v' in the columns of code k, over all rows of the tile
    ratio_k = mean_k / (the largest mean of the tile)
    code_k  = 255 + floor((bits(ratio_k) - bits(1) + t) / 2^19), at least 1;
              0 where mean_k is                                                             (C13)
    row_i   = (sum of v' in row i) / (sum of level(code_j) over its columns), to 17 bits,
              2^-110 to 2^111; 0 where the sum is                                           (C14)

with bits(x) the pattern of a float, and the levels 16 to an octave, 2^19 units of the pattern
apart: level(c) = float_from_bits(bits(1) + (c - 255) * 2^19), level(0) = 0.  t = 2^18 rounds to
nearest; the dither has t = 8 q, with q of equation (D2) at the first element of the code, its last
six bits replaced by 32.

Sums are float32, in this order, so that every vector width gives the same bits: of a column over
its rows in order, then over the columns of a code; of a row over runs of 256 columns, each run in
16 lanes, which are added in halves.  The sum of levels, multiples of 2^-20, is exact, and rounded
once.  In place of the mean stands the sum, where the end of a row leaves a code fewer columns
times those that it lacks: only ratios matter.

Encoding is idempotent.  A level has 5 significant bits and a row 17, so v is exact.  With
u = 2^-24, a mean of such v errs by at most 64 u (63 additions and a division), a ratio by less than
130 u, which is 130 units of the pattern; t keeps 256 from both ends of a cell.  The sum of a row
errs by at most (15 + 4 + 15) u, the quotient by 36 u, and half a unit of 17 bits is at least 64 u.

Error: in place of v' stands the mean of its row times that of its code's columns over that of the
tile.  Rows are kept within 2^-17, the means of columns within half a level (nearest, at most 1/32)
or a level (dithered).  A v' of 0 decodes to 0 only where its row or its column is 0 throughout.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec.blocks import place_in_block
from zero8.spec.tiles import BITS, COLUMNS_PER_BYTE, Tiles

LIMIT = 2.0**112
"""A block in which a step makes a v' of at least this is left as it is: sums stay finite."""
MIN_ROW, MAX_ROW = 2.0**-110, 2.0**111
"""With the smallest row, the smallest v is still a normal number."""
ONE_BITS = 0x3F800000
CELL_BITS = 19
ROW_BITS = 17
RUN, LANES = 256, 16
"""Of the sum of a row."""


@dataclass(frozen=True)
class SharedCode:
    """v of rank 1, a code for one or more columns of a tile and a float for each row."""

    bits = BITS
    signed = False
    scale_shape = ()
    zero_code = 0

    @cached_property
    def levels(self) -> Tensor:
        """(256,) float32."""
        code = torch.arange(256, dtype=torch.int32, device="cpu")
        levels = (ONE_BITS + (code - 255 << CELL_BITS)).view(torch.float32)
        return torch.where(code == 0, 0.0, levels)

    def decode(self, codes: Tensor, scale: Tensor, gain: float) -> Tensor:
        """Return the decoded values, times `gain`, equation (C12); float32.

        Args:
            codes: (numel,) uint8, the code of each element.
            scale: (numel,) float32, that of each element's row.
            gain: what the values are multiplied by.
        """
        levels = self.levels.to(codes.device)[codes.to(torch.int64)]
        return ieee.mul(levels, ieee.mul(scale, gain))

    def encoded(
        self, x: Tensor, block: Tensor, tiles: Tiles, dither: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the codes and the rows of values; those beyond LIMIT count as LIMIT.

        Args:
            x: (numel,) float32, flushed, not negative.
            block: (numel,) int64, the block of each element.
            tiles: of these elements.
            dither: (numel,) int64 of `zero8.spec.dither.in_blocks`, or None to round to nearest.

        Returns:
            codes: (numel,) uint8, the code of each element.
            rows: (number of blocks,) float32.
        """
        if not x.numel():
            return x.to(torch.uint8), x.clone()
        x = x.clamp(max=LIMIT)
        codes = _codes(x, block, tiles, dither)[tiles.byte]
        levels = self.levels.to(x.device)[codes.to(torch.int64)].double()
        sum_of_levels = levels.new_zeros(tiles.tile.numel()).index_add_(0, block, levels)
        total = _sums_of_rows(x, block, tiles.tile.numel())
        rows = _rounded(ieee.div(total, sum_of_levels.clamp(min=1).float()))
        return codes, torch.where(total == 0, 0.0, rows.clamp(MIN_ROW, MAX_ROW))


def _codes(x: Tensor, block: Tensor, tiles: Tiles, dither: Tensor | None) -> Tensor:
    """Return the codes of all tiles, equation (C13); (bytes,) uint8, 0 in bytes without code."""
    tile = torch.zeros(tiles.num_bytes, dtype=torch.int64, device=x.device)
    tile[tiles.byte] = tiles.tile[block]
    mean = _means(x, block, tiles)
    largest = x.new_zeros(tiles.num_tiles).scatter_reduce(0, tile, mean, "amax")[tile]
    ratio = ieee.div(mean, torch.where(largest == 0, 1.0, largest))
    threshold: int | Tensor = 1 << (CELL_BITS - 1)
    if dither is not None:
        index = torch.arange(x.numel(), device=x.device)
        first = torch.zeros_like(tile).scatter_reduce(
            0, tiles.byte, index, "amin", include_self=False
        )
        threshold = (dither[first] & ~63 | 32) << 3
    offset = ratio.view(torch.int32).to(torch.int64) - ONE_BITS + threshold
    code = (255 + (offset >> CELL_BITS)).clamp(1, 255)
    return torch.where(mean == 0, 0, code).to(torch.uint8)


def _means(x: Tensor, block: Tensor, tiles: Tiles) -> Tensor:
    """Return the mean of the columns of each code, times its rows and columns; (bytes,)."""
    shape = tiles.num_bytes, COLUMNS_PER_BYTE
    sums, is_column = x.new_zeros(shape), x.new_zeros(shape, dtype=torch.bool)
    row = tiles.row[block]
    for number in range(int(row.max()) + 1):
        here = row == number
        place = tiles.byte[here], tiles.column[here]
        sums[place] = _sum(sums[place], x[here])
        is_column[place] = True
    total = x.new_zeros(shape[0])
    for column in sums.unbind(1):
        total = _sum(total, column)
    shared = torch.ones(shape[0], dtype=torch.int64, device=x.device)
    shared[tiles.byte] = tiles.shared[block]
    columns = is_column.sum(1).clamp(min=1)
    return torch.where(columns == shared, total, ieee.div(total * shared, columns.float()))


def _sums_of_rows(x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
    """Return the sum of each block."""
    place = place_in_block(block, num_blocks)
    longest = int(place.max()) + 1
    values = x.new_zeros(num_blocks, -(-longest // RUN) * RUN)
    values[block, place] = x
    total = x.new_zeros(num_blocks)
    for run in values.split(RUN, 1):
        lanes = x.new_zeros(num_blocks, LANES)
        for part in run.split(LANES, 1):
            lanes = _sum(lanes, part)
        while lanes.shape[1] > 1:
            lanes = _sum(*lanes.chunk(2, 1))
        total = _sum(total, lanes[:, 0])
    return total


def _sum(a: Tensor, b: Tensor) -> Tensor:
    return ieee.fma(a, 1.0, b)


def _rounded(rows: Tensor) -> Tensor:
    """Return rows to ROW_BITS significant bits, half up."""
    dropped = 24 - ROW_BITS
    bits = rows.view(torch.int32) + (1 << (dropped - 1)) & -(1 << dropped)
    return bits.view(torch.float32)
