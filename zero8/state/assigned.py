# SPDX-License-Identifier: Apache-2.0
"""Moments and steps that other code assigns into a live state, under the names of torch's."""

from typing import Any

import torch
from torch import Tensor

from zero8.state.extent import Extent, local
from zero8.state.header import StateHeader
from zero8.state.memory import unknown_memory
from zero8.state.plain import PlainState, checked_step, dense_part


def take_assigned(state: PlainState, name: str, *, check_values: bool) -> None:
    """Encode the moments that other code has assigned beside codes, and make its step an int.

    Moments that are kept in float32 are brought into the form of entries, if they have another.
    Raises ValueError if a moment or the step does not fit; nothing has changed then.
    """
    entries, extent = state.entries, state.extent
    header = StateHeader.of(entries, name)
    step = checked_step(entries)
    is_encoded = header.codec is not None
    moments = {}
    for rule in header.algorithm.moments:
        if rule.name in entries and (is_encoded or not _is_kept(entries[rule.name], extent)):
            given = {rule.name: _in_form(entries[rule.name], extent)}
            moments[rule.name] = dense_part(given, rule, extent, name, check_values=check_values)
    stores = state.stores(name) if is_encoded and moments else []
    entries["step"] = step
    for store in stores:
        if store.name in moments:
            store.write(0, moments[store.name])
            del entries[store.name]
    if not is_encoded:
        for key, values in moments.items():
            entries[key] = extent.entry(values.float(), extent.shape, extent.box)
    if moments:
        entries |= unknown_memory(header.algorithm)


def _is_kept(value: Any, extent: Extent) -> bool:
    """Return whether a moment is a float32 entry as it is."""
    return isinstance(value, Tensor) and value.dtype == torch.float32 and extent.has_form(value)


def _in_form(value: Any, extent: Extent) -> Any:
    """Return a moment; if it is this rank's part of one, in the form of entries."""
    if not isinstance(value, Tensor) or tuple(value.shape) != extent.local_shape:
        return value
    return extent.entry(local(value.detach()), extent.shape, extent.box)
