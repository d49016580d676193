# SPDX-License-Identifier: Apache-2.0
"""Steps INT8 weights on devices whose kernel does not take them: on CUDA.

The kernel steps float32 copies of some rows at a time, of `MOST_ELEMENTS` at most, unless the rows
of a block have more; PyTorch decodes and rounds them by equations (W1) to (W3) of
`zero8.spec.int8_rows`.  The CPU's kernel does the same to the bit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from zero8.spec import int8_rows
from zero8.spec.grid import is_narrow, rows_per_block
from zero8.spec.segment import Rounding
from zero8.state.table import Piece, PieceTable
from zero8.state.weights import Int8Rows

MOST_ELEMENTS = 1 << 24
"""The most elements that are copied at once."""


def is_widened(device: torch.device) -> bool:
    """Return whether INT8 weights on a device are stepped as float32 copies."""
    return device.type != "cpu"


def rows_of_piece(rows: Int8Rows, piece: Piece) -> Int8Rows:
    """Return views of the codes and scales of a piece of a parameter's rows."""
    columns = piece.shape[1]
    first, count = piece.start // columns, piece.numel // columns
    return Int8Rows(rows.codes.narrow(0, first, count), rows.scales.narrow(0, first, count))


def store(rows: Int8Rows, weights: Tensor, record: np.void, first: int) -> None:
    """Round weights to INT8; `first` is the index in the parameter of their first element."""
    scales = int8_rows.new_scales(weights, rows.scales)
    rounding, phase = Rounding(int(record["rounding"])), int(record["param_phase"])
    thresholds = int8_rows.thresholds(rounding, phase, first, weights.shape, weights.device)
    rows.codes.copy_(int8_rows.encoded(weights, scales, thresholds))
    rows.scales.copy_(scales)


def buffer_of(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    """Return a float32 buffer for the weights of any of some pieces."""
    return torch.empty(max((one.numel for one in pieces), default=0), device=device)


def in_chunks(table: PieceTable) -> PieceTable:
    """Return a table of pieces of whole rows, cut into pieces that are stepped together.

    They begin at rows that begin blocks, as those of the whole do.
    """
    pieces = (chunk for piece in table.pieces for chunk in _chunks(piece))
    return PieceTable(tuple(pieces), table.numel)


def _chunks(piece: Piece) -> Iterator[Piece]:
    columns = piece.shape[1]
    together = _rows_that_begin_a_block(piece)
    at_most = MOST_ELEMENTS // max(1, together * columns)
    rows = together * max(1, at_most)
    row, end = piece.first // max(1, columns), (piece.first + piece.numel) // max(1, columns)
    while row < end:
        following = min(end, (row // rows + 1) * rows)
        first = row * columns
        start, numel = piece.start + first - piece.first, (following - row) * columns
        yield replace(piece, start=start, first=first, numel=numel)
        row = following


def _rows_that_begin_a_block(piece: Piece) -> int:
    """Return a number of rows of which each multiple begins a block."""
    if not piece.is_quantized:  # one row of the grid
        return piece.grid.block_size // math.gcd(piece.grid.block_size, piece.shape[1])
    return rows_per_block(piece.shape, piece.block_size) if is_narrow(piece.shape) else 1
