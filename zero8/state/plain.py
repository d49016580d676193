# SPDX-License-Identifier: Apache-2.0
"""The state of one parameter, or of a box of it, as it lives in `optimizer.state[p]`.

Entries (tensors and numbers, so that every checkpoint writer can carry them):

    step              int, steps taken
    format            int64 tensor, `zero8.state.header`
    MEMORY            floats that the algorithm remembers: Adam's `history` (equation (S1) of
                      zero8.spec.adam)
    MOMENT_q8         uint8 codes, shaped as the parameter, for each MOMENT of the algorithm:
                      exp_avg and exp_avg_sq of Adam
    MOMENT_q4, _q6    in place of these, codes of 4 or 6 bits in units: BlockGrid.code_shape
    MOMENT_scale      float32, shape[:k] + (blocks per row,) + scale_shape, which is the code's;
                      for narrow rows, groups of which make a block (see zero8.spec.grid),
                      (groups, 1) + scale_shape
    MOMENT            float32 moments, in place of the two above

The names differ from those of fp32 optimizers where the contents do, so that a reader of float32
moments finds none instead of misreading codes.  Other code may keep further entries.  For a box
(`zero8.state.extent`) the tensors are those of the whole parameter, sharded as its framework does.

Checkpoints (`saved_form`) carry the same entries, except that narrow rows have one scale each
(`zero8.state.narrow`), (rows, 1) + scale_shape: a shard boundary may cut a group, whose parts then
have different scales.  In float32 (`float32_form`) checkpoints carry the entries of torch's AdamW:
step, a float32 tensor, and the moments.
"""

import math
from typing import Any

import torch
from torch import Tensor

from zero8.spec.algorithm import MomentRule
from zero8.spec.buffers import check_entry
from zero8.spec.faults import fault_of_values
from zero8.spec.grid import is_narrow
from zero8.spec.shown import shown, shown_keys
from zero8.state import narrow
from zero8.state.entries import codes_key
from zero8.state.extent import Box, Extent
from zero8.state.header import Entries, StateHeader
from zero8.state.store import MomentStore

_LOADABLE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes of other optimizers' moments."""


def stores_of(entries: Entries, extent: Extent, name: str) -> list[MomentStore]:
    """Return the moments of a state, live or as checkpoints carry it; they may share its tensors.

    The entries are those of this part, or of the whole parameter.  Raises ValueError if they do
    not fit.
    """
    header = StateHeader.of(entries, name)
    _check_shape(name, header.shape, extent.shape)
    parameter, codec, stores = header.piece(name), header.codec, []
    grid, table = parameter.grid, extent.table(parameter)
    for rule in header.algorithm.moments:
        if codec is None:
            dense = _flat(entries, rule.name, torch.float32, extent, extent.shape, extent.box)
            stores.append(MomentStore(codec, rule, table, dense[:0].byte(), dense[:0], dense))
            continue
        code, key = codec.code_of(rule), f"{rule.name}_scale"
        shape, box = grid.code_shape(extent.shape, code.bits), extent.code_box(parameter, code.bits)
        codes = _flat(entries, codes_key(rule, code), torch.uint8, extent, shape, box)
        shape, box = grid.scale_shape(extent.shape), extent.scale_box(parameter)
        if has_rows := narrow.has_scales_of_rows(extent, entries.get(key), box):
            shape, box = (extent.shape[0], 1), narrow.rows(extent)
        scales = _flat(entries, key, torch.float32, extent, (*shape, *code.scale_shape), box)
        scales = scales.view(-1, *code.scale_shape)
        store = MomentStore(codec, rule, table, codes, scales, scales.flatten()[:0])
        stores.append(narrow.joined(store, extent) if has_rows else store)
    return stores


def saved_form(entries: Entries, extent: Extent) -> Entries:
    """Return the entries of a state as checkpoints carry them."""
    header, stores = StateHeader.of(entries, ""), stores_of(entries, extent, "")
    has_groups, device = header.block_size and is_narrow(header.shape), stores[0].codes.device
    if not has_groups and device.type == "cpu":
        return entries
    # torch loads full state dicts if all tensors that have dimensions are on one device.
    entries = entries | {"format": entries["format"].to(device)}
    for store in stores if has_groups else ():
        scales = narrow.scales_of_rows(store, extent)
        shape = (extent.shape[0], *scales.shape[1:])
        entries[f"{store.name}_scale"] = extent.entry(scales, shape, narrow.rows(extent))
    return entries


def float32_form(entries: Entries, extent: Extent) -> Entries:
    """Return the entries of the fp32 optimizer, which encode to the same codes.

    Float32 moments are the live tensors, as in AdamW's state dicts.
    """
    found = {"step": torch.tensor(float(entries["step"]), device="cpu")}
    for store in stores_of(entries, extent, ""):
        dense = store.dense if store.codec is None else store.read(0, store.table.numel)
        found[store.name] = extent.entry(dense, extent.shape, extent.box)
    return found


def checked_step(saved: Entries) -> int:
    """Return how many steps a saved state has taken; raise ValueError if it does not say it."""
    _check_is_there(saved, "step")
    step = saved["step"]
    try:
        number = int(step)
        valid = 0 <= number < 2**62 and bool(number == step)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: tensors
        valid = False
    if not valid:
        raise ValueError(f"state entry step: got {shown(step)}, expected a whole number of steps")
    return number


def checked_dense(
    rule: MomentRule, owner: str, values: object, *, check_values: bool = True
) -> Tensor:
    """Return an fp32 optimizer's moment; raise ValueError if it is no tensor of numbers.

    Numbers that moments cannot have raise with `check_values`.  Where a rank must not raise alone,
    `MomentStore.write` marks their blocks.
    """
    name = f"{rule.name} of {owner}"
    if isinstance(values, Tensor) and not values.is_floating_point():
        raise ValueError(f"{name}: got dtype {values.dtype}, expected float32 values")
    numel = values.numel() if isinstance(values, Tensor) else 0
    checked = check_entry(name, values, numel, _LOADABLE_DTYPES)
    if check_values and (found := fault_of_values(checked, is_signed=rule.is_signed)):
        raise ValueError(f"{name}: got {found}; was the checkpoint saved by a run that diverged?")
    return checked


def dense_part(
    saved: Entries, rule: MomentRule, extent: Extent, name: str, *, check_values: bool
) -> Tensor:
    """Return this rank's elements of an fp32 optimizer's moment, in one dimension."""
    part = _part(saved, rule.name, extent, extent.shape, extent.box)
    values = checked_dense(rule, name, part, check_values=check_values)
    _check_shape(name, tuple(values.shape), extent.local_shape)
    flat: Tensor = values.detach().reshape(-1)
    return flat


def _part(entries: Entries, key: str, extent: Extent, shape: tuple[int, ...], box: Box) -> Any:
    """Return this rank's part of an entry; no tensors as they are, which a later check refuses."""
    _check_is_there(entries, key)
    value = entries[key]
    if not isinstance(value, Tensor):
        return value
    return extent.part_of(f"state entry {key}", value, shape, box)


def _flat(
    entries: Entries,
    key: str,
    dtype: torch.dtype,
    extent: Extent,
    shape: tuple[int, ...],
    box: Box,
) -> Tensor:
    """Return this rank's part of an entry of this dtype, in one dimension."""
    numel = math.prod((*box[0], *shape[len(box[0]) :]))
    part = _part(entries, key, extent, shape, box)
    return check_entry(f"state entry {key}", part, numel, [dtype]).reshape(-1)


def _check_is_there(entries: Entries, key: str) -> None:
    if key not in entries:
        raise ValueError(f"state entry {key}: missing; got {shown_keys(entries)}")


def _check_shape(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if got != expected:
        raise ValueError(
            f"state of {name}: got moments of shape {got}, the parameter has {expected}; was the "
            "checkpoint made by another model?"
        )
