# SPDX-License-Identifier: Apache-2.0
"""Makes fragments from whole states of our optimizers and of fp32 ones."""

import math
from pathlib import Path

import torch
from torch import Tensor

from zero8.checkpoint.read.fragment import Fragment
from zero8.spec import dither
from zero8.spec.algorithm import Algorithm
from zero8.spec.algorithms import ALGORITHMS, algorithm_of_fp32
from zero8.spec.buffers import check_entry
from zero8.spec.shown import shown_keys
from zero8.state import narrow
from zero8.state.entries import FIRST_ENTRIES, bits_at, is_of_fp32
from zero8.state.extent import Extent
from zero8.state.header import StateHeader
from zero8.state.memory import checked_memory, unknown_memory
from zero8.state.plain import PlainState, checked_dense, checked_step
from zero8.state.store import MomentStore
from zero8.state.table import Piece


def fragment_of(file: Path, name: str, entries: dict, weights: Tensor | None) -> Fragment:
    """Return the fragment of a whole state, of `zero8.state.plain` or of an fp32 optimizer.

    Raises ValueError, naming the file, if the entries are inconsistent.
    """
    try:
        extent = Extent.whole(_shape_of(entries, name))
        if is_of_fp32(entries):
            algorithm = algorithm_of_fp32(entries)
            memory, stores = unknown_memory(algorithm), _of_fp32(algorithm, name, entries, extent)
        else:
            algorithm = StateHeader.of(entries, name).algorithm
            memory = checked_memory(algorithm, entries)
            stores = PlainState.local(entries, extent, name).stores(name)
        if "step" not in entries and algorithm.step_if_unknown is None:
            raise ValueError(f"state of {name}: got entries {shown_keys(entries)}, without step")
        step = checked_step({"step": algorithm.step_if_unknown, **entries})
        correction = entries.get("param_correction")
        if correction is not None:
            check_entry("param_correction", correction, extent.numel, [torch.int8])
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file}: {error}") from error
    return Fragment(
        name,
        file,
        step,
        memory,
        tuple(stores),
        weights.reshape(-1) if weights is not None and weights.numel() == extent.numel else None,
        None if correction is None else correction.reshape(-1),
        is_of_fp32(entries),
        _blocks_joined(entries, extent, stores),
    )


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


def _of_fp32(algorithm: Algorithm, name: str, entries: dict, extent: Extent) -> list[MomentStore]:
    """Return an fp32 optimizer's moments over the extent's segment table."""
    identity = dither.identity_of(name)
    whole = Piece(0, math.prod(extent.shape), 0, extent.shape, identity, 0, name)
    table, stores = extent.table(whole), []
    none = torch.empty(0)
    for rule in algorithm.moments:
        values = checked_dense(rule, name, entries.get(rule.name))
        if values.numel() != extent.numel:
            raise ValueError(
                f"{rule.name} of {name}: got {values.numel()} elements, expected {extent.numel}"
            )
        dense = values.reshape(-1).to(torch.float32)
        stores.append(MomentStore(None, rule, table, none.byte(), none, dense))
    return stores
