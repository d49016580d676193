# SPDX-License-Identifier: Apache-2.0
"""v of rank 1 in tiles, in the bytes that a state on ranks could have.

Each row of a tile has a float and a byte per 64 elements.  So its bytes lie where the row does, as
codes and scales do, and ranks that cut a matrix between bands of rows need nothing of each other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.below.shared import BYTES_OF_FLOAT, BYTES_OF_M, parts
from zero8.spec.grid import is_narrow

ROWS, COLUMNS = 64, 256
PER_BYTE = 64
"""How many elements of a row have a byte."""
PER_OCTAVE = 16
"""Levels of a factor of a column in an octave."""
GOLDEN, PLASTIC = 0.6180339887498949, 0.7548776662466927


def columns_of_a_code(rows: int, columns: int) -> int:
    """Return how many columns of a tile share a code, so that its rows have bytes for all codes."""
    codes, shared = rows * -(-columns // PER_BYTE), 1
    while codes * shared < columns:
        shared *= 2
    return shared


def coded(factors: Tensor, step: int) -> Tensor:
    """Return factors, at most 1 and along the last dimension, as a dithered code keeps them.

    The code is of 8 bits: 0 is 0, and code k is 2^((k - 255)/16), from 16 octaves below 1 on.
    """
    column = torch.arange(factors.shape[-1], dtype=torch.float64)
    threshold = (column * PLASTIC + step * GOLDEN).remainder(1).float()
    code = (255 + PER_OCTAVE * factors.log2() + threshold).floor().clamp(1, 255)
    return torch.where(factors == 0, 0.0, torch.exp2((code - 255) / PER_OCTAVE))


@dataclass(frozen=True)
class Bands:
    """v_ij = row_i * level(code_j) in tiles of 64 rows and 256 columns.

    Rows and columns have the means of theirs, as with `Tiles`; a short tile has a code for 2, 4 or
    more columns together.  Narrow rows are kept whole.
    """

    def keep(self, m: Tensor, v: Tensor, step: int) -> None:
        """Replace v by what its tiles decode to."""
        if is_narrow(v.shape):
            return
        for band in parts(v.flatten(1), ROWS, 0):
            for tile in parts(band, COLUMNS, 2):
                _keep_tile(tile, step)

    def bytes_of(self, shape: torch.Size) -> float:
        """Return the bytes of 8-bit m and of v."""
        m = shape.numel() * BYTES_OF_M
        if is_narrow(shape):
            return m + BYTES_OF_FLOAT * shape.numel()
        columns = shape.numel() // shape[0]
        of_row = BYTES_OF_FLOAT * -(-columns // COLUMNS) + -(-columns // PER_BYTE)
        return m + shape[0] * of_row


def _keep_tile(tile: Tensor, step: int) -> None:
    """Replace tiles, (bands, rows, tiles, columns)."""
    row, column = tile.mean(3, keepdim=True), tile.mean(1, keepdim=True)
    for group in parts(column, columns_of_a_code(tile.shape[1], tile.shape[3]), 3):
        group.copy_(group.mean(4, keepdim=True).expand_as(group))
    largest, mean = column.amax(3, keepdim=True), row.mean(1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    level = coded(column / largest.clamp(min=tiny), step)
    torch.mul(row * (largest / mean.clamp(min=tiny)), level, out=tile)
