# SPDX-License-Identifier: Apache-2.0
"""Scales of narrow rows in checkpoints: one per row, equal within a group.

A group of narrow rows has one scale (`zero8.spec.grid`), or one on each side of a shard boundary
that cuts it.  With one scale per row, scales are sharded as rows are, for any world size.
"""

from dataclasses import replace

import torch
from torch import Tensor

from zero8.spec.codec import dequantize
from zero8.spec.grid import is_narrow, rows_per_block
from zero8.state.extent import Box, Extent
from zero8.state.store import MomentStore


def rows(extent: Extent) -> Box:
    """Return the box of a part of a parameter in its scales of rows, which have shape (rows, 1)."""
    return (extent.local_shape[0], 1), (extent.offset[0], 0)


def has_scales_of_rows(extent: Extent, scales: object, of_groups: Box) -> bool:
    """Return whether the scales of a parameter are one per narrow row, not one per group."""
    if not is_narrow(extent.shape) or not isinstance(scales, Tensor) or scales.ndim == 0:
        return False
    return scales.shape[0] != of_groups[0][0]


def scales_of_rows(store: MomentStore, extent: Extent) -> Tensor:
    """Return the scale of each row of a part of a parameter; (rows, 1, *code.scale_shape)."""
    (piece,) = store.table.pieces
    return store.scales[_group_of_row(extent, piece.block_size)].unsqueeze(1)


def scales_of_groups(scales: Tensor, extent: Extent, block_size: int) -> Tensor:
    """Return the scale of each group's first row; scales are (rows, *code.scale_shape)."""
    group = _group_of_row(extent, block_size)
    first = torch.nonzero(torch.diff(group, prepend=group[:1] - 1)).flatten()
    return scales[first.to(scales.device)]


def cut_groups(scales: Tensor, extent: Extent, block_size: int) -> Tensor:
    """Return the groups of a part whose rows have different scales, as a boundary has cut them.

    `scales` are (rows, *code.scale_shape) float32.
    """
    group = _group_of_row(extent, block_size).to(scales.device)
    differs = scales != scales_of_groups(scales, extent, block_size)[group]
    cut: Tensor = group[differs.unsqueeze(-1).flatten(1).any(1)].unique()
    return cut


def joined(store: MomentStore, extent: Extent) -> MomentStore:
    """Return a moment with the scales of groups, of one that has those of rows.

    Rows of a group that a former shard boundary cut have different scales: they are decoded and
    encoded again together, each moment within half a code.  The others are kept.
    """
    (piece,), scales = store.table.pieces, store.scales
    cut = cut_groups(scales, extent, piece.block_size).tolist()
    codes = store.codes.clone() if cut else store.codes
    of_groups = scales_of_groups(scales, extent, piece.block_size)
    store = replace(store, codes=codes, scales=of_groups)
    group, length = _group_of_row(extent, piece.block_size), piece.grid.own_row_length
    for number in cut:
        first, *_, last = torch.nonzero(group == number).flatten().tolist()
        begin, count = first * length, last + 1 - first
        row = torch.arange(count, device=scales.device).repeat_interleave(length)
        codes = store.codes_of(0, begin, begin + count * length)
        store.write(begin, dequantize(store.code, codes, scales[first : last + 1], row))
    return store


def _group_of_row(extent: Extent, block_size: int) -> Tensor:
    """Return the group of each row, counted from the first that the part touches."""
    first, per_group = extent.offset[0], rows_per_block(extent.shape, block_size)
    row = torch.arange(first, first + extent.local_shape[0], device="cpu")
    return row // per_group - first // per_group
