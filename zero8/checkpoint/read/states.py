# SPDX-License-Identifier: Apache-2.0
"""Makes fragments from states of our optimizers and of fp32 ones."""

import math
from pathlib import Path

import torch
from torch import Tensor

from zero8.algorithms.table import algorithm_of_fp32
from zero8.checkpoint.read.fragment import Fragment
from zero8.spec import dither
from zero8.spec.algorithm import Algorithm
from zero8.spec.buffers import check_entry
from zero8.spec.shown import shown_keys
from zero8.state.entries import is_of_fp32
from zero8.state.extent import Extent
from zero8.state.header import StateHeader
from zero8.state.memory import checked_memory, unknown_memory
from zero8.state.plain import PlainState, checked_dense, checked_step
from zero8.state.store import MomentStore
from zero8.state.table import Piece


def fragment_of(
    file: Path, name: str, entries: dict, extent: Extent, weights: Tensor | None
) -> Fragment:
    """Return the fragment of a state, or of a part of one.

    Args:
        file: its file.
        name: the parameter's name.
        entries: the state, of `zero8.state.plain` or of an fp32 optimizer.
        extent: the part of the parameter.
        weights: the weights of that part, if known.

    Raises:
        ValueError: naming the file, if the entries are inconsistent.
    """
    try:
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
        "",
        name,
        file,
        step,
        memory,
        tuple(stores),
        weights.reshape(-1) if weights is not None and weights.numel() == extent.numel else None,
        None if correction is None else correction.reshape(-1),
        is_of_fp32(entries),
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
