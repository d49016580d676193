# SPDX-License-Identifier: Apache-2.0
"""Makes fragments from whole states of our optimizers and of fp32 ones."""

from pathlib import Path

import torch
from torch import Tensor

from zero8.checkpoint.read.fragment import Fragment
from zero8.spec.algorithms import ALGORITHMS, algorithm_of_fp32
from zero8.spec.buffers import check_entry
from zero8.spec.codec import CODECS, DEFAULT_CODEC
from zero8.spec.dither import identity_of
from zero8.spec.shown import shown_keys
from zero8.state import narrow
from zero8.state.entries import FIRST_ENTRIES, bits_at, is_of_fp32
from zero8.state.extent import Extent
from zero8.state.header import StateHeader
from zero8.state.memory import checked_memory
from zero8.state.plain import PlainState, checked_step
from zero8.state.store import MomentStore
from zero8.state.table import Piece
from zero8.state.target import Target


def fragment_of(file: Path, name: str, entries: dict, weights: Tensor | None) -> Fragment:
    """Return the fragment of a whole state, of `zero8.state.plain` or of an fp32 optimizer.

    Raises ValueError, naming the file, if the entries are inconsistent.
    """
    try:
        extent, of_fp32 = Extent.whole(_shape_of(entries, name)), is_of_fp32(entries)
        if of_fp32:
            piece = Piece(0, extent.numel, 0, extent.shape, identity_of(name), 0, name)
            codec = CODECS[DEFAULT_CODEC]  # which encodes nothing in a piece without blocks
            entries = Target(algorithm_of_fp32(entries), codec, piece, extent).from_fp32(entries)
        stores = PlainState.local(entries, extent, name).stores(name)
        memory = checked_memory(StateHeader.of(entries, name).algorithm, entries)
        step = checked_step(entries)
        correction = entries.get("param_correction")
        if correction is not None:
            correction = check_entry("param_correction", correction, extent.numel, [torch.int8])
            correction = correction.reshape(-1)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file}: {error}") from error
    if weights is not None:
        weights = weights.reshape(-1) if weights.numel() == extent.numel else None
    joined = _blocks_joined(entries, extent, stores)
    return Fragment(name, file, step, memory, tuple(stores), weights, correction, of_fp32, joined)


def _blocks_joined(entries: dict, extent: Extent, stores: list[MomentStore]) -> int:
    """Return how many blocks of narrow rows were cut, and encoded anew by `PlainState.local`."""
    (piece,) = stores[0].table.pieces
    joined = set[int]()
    for store in stores:
        scales = entries.get(f"{store.name}_scale")
        if narrow.has_scales_of_rows(piece, extent, scales):
            joined.update(narrow.cut_groups(scales, extent, piece.block_size).tolist())
    return len(joined)


def _shape_of(state: dict, name: str) -> tuple[int, ...]:
    for key in FIRST_ENTRIES:
        if isinstance(state.get(key), Tensor):
            has_shape = bits_at(key) in (None, 8)
            return tuple(state[key].shape) if has_shape else StateHeader.of(state, name).shape
    fp32 = ", ".join(one.fp32_name for one in ALGORITHMS)
    raise ValueError(
        f"state of {name}: got entries {shown_keys(state)}, expected those of an optimizer of "
        f"zero8, or of {fp32}"
    )
