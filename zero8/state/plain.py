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

from zero8.spec.algorithm import Algorithm, MomentRule
from zero8.spec.buffers import check_entry
from zero8.spec.codec import Codec
from zero8.spec.faults import fault_of_values
from zero8.spec.grid import is_narrow
from zero8.spec.shown import shown, shown_keys
from zero8.state import narrow
from zero8.state.entries import codes_key
from zero8.state.extent import Box, Extent, local
from zero8.state.header import Entries, StateHeader
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable

_LOADABLE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes of other optimizers' moments."""


def stores_in(entries: Entries, extent: Extent, name: str) -> list[MomentStore]:
    """Return the live moments of a state, over a segment table whose pieces are called `name`."""
    header, table = _header_and_table(entries, extent, name)
    return [_store(entries, header.codec, rule, table) for rule in header.algorithm.moments]


def stores_of_saved(saved: Entries, extent: Extent, name: str) -> list[MomentStore]:
    """Return the moments in a checkpoint's entries, whose tensors they may share.

    The entries are those of this part, or of the whole parameter.  Raises ValueError if they do
    not fit.
    """
    header, table = _header_and_table(saved, extent, name)
    parameter, codec, stores = header.piece(name), header.codec, []
    for rule in header.algorithm.moments:
        if codec is None:
            entries = {rule.name: _part(saved, rule.name, extent)}
            stores.append(_store(entries, codec, rule, table))
            continue
        code, grid, shape = codec.code_of(rule), parameter.grid, extent.shape
        key, key_of_scales = codes_key(rule, code), f"{rule.name}_scale"
        box = extent.code_box(parameter, code.bits)
        codes = _part(saved, key, extent, grid.code_shape(shape, code.bits), box)
        has_rows = is_narrow(shape)
        leading = (shape[0], 1) if has_rows else grid.scale_shape(shape)
        box = narrow.rows(extent) if has_rows else extent.scale_box(parameter)
        scales = _part(saved, key_of_scales, extent, (*leading, *code.scale_shape), box)
        if not has_rows:
            stores.append(_store({key: codes, key_of_scales: scales}, codec, rule, table))
            continue
        num_scales = math.prod((*box[0], *code.scale_shape))
        check_entry(f"state entry {key_of_scales}", scales, num_scales, [torch.float32])
        of_rows = scales.reshape(-1, *code.scale_shape)
        of_groups = narrow.scales_of_groups(of_rows, extent, parameter.block_size)
        store = _store({key: codes, key_of_scales: of_groups}, codec, rule, table)
        stores.append(narrow.joined(store, of_rows, extent))
    return stores


def saved_form(entries: Entries, extent: Extent) -> Entries:
    """Return the entries of a state as checkpoints carry them."""
    header, stores = StateHeader.of(entries, ""), stores_in(entries, extent, "")
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
    for store in stores_in(entries, extent, ""):
        dense = store.dense if store.codec is None else store.read(0, store.table.numel)
        found[store.name] = extent.entry(dense, extent.shape, extent.box)
    return found


def format_entry(algorithm: Algorithm, codec: Codec | None, piece: Piece) -> Entries:
    """Return the entry `format` of a state, by its key."""
    kept = codec if piece.is_quantized else None
    header = StateHeader(algorithm, kept, piece.block_size, piece.identity, piece.shape)
    return {"format": header.packed()}


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
    part = _part(saved, rule.name, extent)
    values = checked_dense(rule, name, part, check_values=check_values)
    _check_shape(name, tuple(values.shape), extent.local_shape)
    flat: Tensor = values.detach().reshape(-1)
    return flat


def _header_and_table(
    entries: Entries, extent: Extent, name: str
) -> tuple[StateHeader, PieceTable]:
    header = StateHeader.of(entries, name)
    _check_shape(name, header.shape, extent.shape)
    return header, extent.table(header.piece(name))


def _store(
    entries: Entries, codec: Codec | None, rule: MomentRule, table: PieceTable
) -> MomentStore:
    """Return a moment whose entries are local."""
    if codec is None:
        dense = _entry(entries, rule.name, torch.float32, table.numel)
        return MomentStore(codec, rule, table, dense[:0].byte(), dense[:0], dense)
    code = codec.code_of(rule)
    per_block, num_bytes = code.scale_shape, table.code_offsets(code.bits)[-1]
    num_scales = table.num_blocks * math.prod(per_block)
    codes = _entry(entries, codes_key(rule, code), torch.uint8, num_bytes)
    scales = _entry(entries, f"{rule.name}_scale", torch.float32, num_scales)
    return MomentStore(codec, rule, table, codes, scales.view(-1, *per_block), scales[:0])


def _entry(entries: Entries, key: str, dtype: torch.dtype, numel: int) -> Tensor:
    """Return a live entry in one dimension."""
    _check_is_there(entries, key)
    entry = check_entry(f"state entry {key}", local(entries[key]), numel, [dtype])
    return entry.reshape(-1)


def _part(
    saved: Entries,
    key: str,
    extent: Extent,
    shape: tuple[int, ...] | None = None,
    box: Box | None = None,
) -> Any:
    """Return this rank's part of a loaded entry, by default one shaped as the parameter.

    Other values than tensors are returned as they are; a later check refuses them.
    """
    _check_is_there(saved, key)
    if not isinstance(saved[key], Tensor):
        return saved[key]
    shape, box = shape or extent.shape, box or extent.box
    return extent.part_of(f"state entry {key}", saved[key], shape, box)


def _check_is_there(entries: Entries, key: str) -> None:
    if key not in entries:
        raise ValueError(f"state entry {key}: missing; got {shown_keys(entries)}")


def _check_shape(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if got != expected:
        raise ValueError(
            f"state of {name}: got moments of shape {got}, the parameter has {expected}; was the "
            "checkpoint made by another model?"
        )
