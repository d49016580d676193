# SPDX-License-Identifier: Apache-2.0
"""Fragments from the entries of plain states, ours or an fp32 Adam's."""

import math
from pathlib import Path

import torch
from torch import Tensor

from zero8.checkpoint.fragment import Fragment
from zero8.spec import dither
from zero8.spec.scalars import UNKNOWN_HISTORY
from zero8.state.extent import Extent
from zero8.state.header import MOMENTS
from zero8.state.plain import (
    PlainState,
    check_dense,
    checked_history,
    checked_step,
    is_of_adam,
)
from zero8.state.store import MomentStore
from zero8.state.table import Piece


def fragment_of(
    file: Path, name: str, entries: dict, extent: Extent, weights: Tensor | None
) -> Fragment:
    """Return the fragment that the entries of a state make.

    Args:
        file: where they are from.
        name: the parameter's.
        entries: those of `zero8.state.plain`, as checkpoints carry them, or of an fp32 Adam; of a
            part of the parameter.
        extent: which part.
        weights: the parameter's part, if it is known.

    Raises:
        ValueError: naming the file, if they do not fit together.
    """
    try:
        step = checked_step(entries) if "step" in entries else None
        if step is None:
            raise ValueError(f"state of {name}: got entries {sorted(entries)}, without step")
        if is_of_adam(entries):
            history, stores = UNKNOWN_HISTORY, _of_adam(name, entries, extent)
        else:
            history = checked_history(entries)
            stores = PlainState.local(entries, extent, name).stores(name)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file}: {error}") from error
    correction = entries.get("param_correction")
    return Fragment(
        "",
        name,
        file,
        step,
        history,
        tuple(stores),
        weights.reshape(-1) if weights is not None and weights.numel() == extent.numel else None,
        correction.reshape(-1) if isinstance(correction, Tensor) else None,
    )


def _of_adam(name: str, entries: dict, extent: Extent) -> list[MomentStore]:
    """Return an fp32 Adam's moments over the extent's segment table."""
    identity = dither.identity_of(name)
    whole = Piece(0, math.prod(extent.shape), 0, extent.shape, identity, 0, name)
    table, stores = extent.table(whole), []
    none = torch.empty(0)
    for which in MOMENTS:
        values = entries.get(which)
        check_dense(which, name, values)
        if values.numel() != extent.numel:
            raise ValueError(
                f"{which} of {name}: got {values.numel()} elements, expected {extent.numel}"
            )
        dense = values.reshape(-1).to(torch.float32)
        stores.append(MomentStore(None, which, table, none.byte(), none, dense))
    return stores
