# SPDX-License-Identifier: Apache-2.0
"""Scales of narrow rows in checkpoints: one per row, equal within a group.

A group of narrow rows has one scale (`zero8.spec.grid`), or one on each side of a shard boundary
that cuts it.  With one scale per row, scales are sharded as rows are, for any world size.
"""

import torch
from torch import Tensor

from zero8.spec.codec import MomentCode, dequantize, quantize
from zero8.spec.grid import is_narrow, rows_per_block
from zero8.spec.packing import packed, unpacked
from zero8.state.extent import Box, Extent
from zero8.state.store import MomentStore
from zero8.state.table import Piece


def rows(extent: Extent) -> Box:
    """Return the box of a part of a parameter in its scales of rows, which have shape (rows, 1)."""
    return (extent.local_shape[0], 1), (extent.offset[0], 0)


def has_scales_of_rows(parameter: Piece, extent: Extent, scales: object) -> bool:
    """Return whether the loaded scales of a parameter are one per narrow row."""
    if not is_narrow(extent.shape) or not isinstance(scales, Tensor) or scales.ndim == 0:
        return False
    loaded = extent.loaded
    (groups, _), _ = loaded.scale_box(parameter)
    return scales.shape[0] == loaded.local_shape[0] != groups


def scales_of_rows(store: MomentStore, extent: Extent) -> Tensor:
    """Return the scale of each row of a part of a parameter; (rows, 1, *code.scale_shape)."""
    (piece,) = store.table.pieces
    return store.scales[_group_of_row(extent, piece.block_size)].unsqueeze(1)


def grouped(
    code: MomentCode, codes: Tensor, scales: Tensor, extent: Extent, parameter: Piece
) -> tuple[Tensor, Tensor]:
    """Return codes, and scales of groups, of a moment that has scales of rows.

    Rows of a group that a former shard boundary cut have different scales: they are decoded and
    encoded again together, each moment within half a code.  All other codes are kept.  Codes are as
    they are stored, (rows, bytes) uint8; scales (rows, 1, *code.scale_shape) float32, returned for
    the groups touched.  `parameter` is the whole one as a piece.
    """
    group = _group_of_row(extent, parameter.block_size).to(scales.device)
    of_group = scales[torch.nonzero(torch.diff(group, prepend=group[:1] - 1)).flatten()]
    joined = group[(scales != of_group[group]).flatten(1).any(1)].unique()
    if not len(joined):
        return codes, of_group
    number = torch.arange(len(group), device=group.device)
    place = torch.isin(group, joined)
    # Rows begin with a unit: those that are taken out lie as the first ones of a parameter do.
    where, row_length = (parameter.grid, 0), parameter.grid.own_row_length
    mixed = codes[place]
    row = number[place].repeat_interleave(row_length)
    of_rows = unpacked(mixed.flatten(), *where, row.numel(), code.bits)
    x = dequantize(code, of_rows, scales.squeeze(1), row)
    block = torch.searchsorted(joined, group[row])
    codes = codes.clone()
    new, of_joined = quantize(code, x, block, len(joined))
    codes[place] = packed(new, *where, code.bits).view_as(mixed)
    of_group[joined] = of_joined.unsqueeze(1)
    return codes, of_group


def _group_of_row(extent: Extent, block_size: int) -> Tensor:
    """Return the group of each row, counted from the first that the part touches."""
    first, per_group = extent.offset[0], rows_per_block(extent.shape, block_size)
    row = torch.arange(first, first + extent.local_shape[0], device="cpu")
    return row // per_group - first // per_group
