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

Checkpoints (`saved`) carry the same entries, except that narrow rows have one scale each
(`zero8.state.narrow`), (rows, 1) + scale_shape: a shard boundary may cut a group, whose parts then
have different scales.  In float32 (`in_float32`) checkpoints carry the entries of torch's AdamW:
step, a float32 tensor, and the moments.
"""

import math
from dataclasses import dataclass
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
from zero8.state.memory import unknown_memory
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable

_LOADABLE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes of other optimizers' moments."""


@dataclass
class PlainState:
    """The entries of the state of one parameter, or of this rank's part of it (`extent`)."""

    entries: Entries
    extent: Extent

    def stores(self, name: str) -> list[MomentStore]:
        """Return the live moments, over a segment table whose pieces are called `name`."""
        header = StateHeader.of(self.entries, name)
        _check_shape(name, header.shape, self.extent.shape)
        table = self.extent.table(header.piece(name))
        return [self._store(header.codec, rule, table) for rule in header.algorithm.moments]

    def _store(self, codec: Codec | None, rule: MomentRule, table: PieceTable) -> MomentStore:
        name = rule.name
        if codec is None:
            dense = _entry(self.entries, name, torch.float32, table.numel)
            return MomentStore(codec, rule, table, dense[:0].byte(), dense[:0], dense)
        code = codec.code_of(rule)
        per_block, num_bytes = code.scale_shape, table.code_offsets(code.bits)[-1]
        num_scales = table.num_blocks * math.prod(per_block)
        codes = _entry(self.entries, codes_key(rule, code), torch.uint8, num_bytes)
        scales = _entry(self.entries, f"{name}_scale", torch.float32, num_scales)
        return MomentStore(codec, rule, table, codes, scales.view(-1, *per_block), scales[:0])

    def saved(self) -> Entries:
        """Return the entries as checkpoints carry them."""
        extent, entries, stores = self.extent, dict(self.entries), self.stores("")
        header, device = StateHeader.of(entries, ""), stores[0].codes.device
        has_groups = header.block_size and is_narrow(header.shape)
        if not has_groups and device.type == "cpu":
            return self.entries
        # torch loads full state dicts if all tensors that have dimensions are on one device.
        entries["format"] = entries["format"].to(device)
        for store in stores if has_groups else ():
            scales = narrow.scales_of_rows(store, extent)
            shape = (extent.shape[0], *scales.shape[1:])
            entries[f"{store.name}_scale"] = extent.entry(scales, shape, narrow.rows(extent))
        return entries

    def in_float32(self) -> Entries:
        """Return the entries of the fp32 optimizer, which encode to the same codes.

        Float32 moments are the live tensors, as in AdamW's state dicts.
        """
        extent = self.extent
        entries = {"step": torch.tensor(float(self.entries["step"]), device="cpu")}
        for store in self.stores(""):
            dense = store.dense if store.codec is None else store.read(0, store.table.numel)
            entries[store.name] = extent.entry(dense, extent.shape, extent.box)
        return entries

    def take_assigned(self, name: str, *, check_values: bool) -> None:
        """Encode the moments that other code has assigned beside codes, and make its step an int.

        Moments that are kept in float32 are brought into the form of entries, if they have another.
        Raises ValueError if a moment or the step does not fit; nothing has changed then.
        """
        entries, extent = self.entries, self.extent
        header = StateHeader.of(entries, name)
        step, is_encoded = checked_step(entries), header.codec is not None
        moments = {}
        for rule in header.algorithm.moments:
            value = entries.get(rule.name)
            is_kept = (
                isinstance(value, Tensor)
                and value.dtype == torch.float32
                and extent.has_form(value)
            )
            if rule.name in entries and (is_encoded or not is_kept):
                if isinstance(value, Tensor) and tuple(value.shape) == extent.local_shape:
                    value = extent.entry(local(value.detach()), extent.shape, extent.box)
                given = {rule.name: value}
                moments[rule.name] = dense_part(
                    given, rule, extent, name, check_values=check_values
                )
        stores = self.stores(name) if is_encoded and moments else []
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

    @classmethod
    def local(cls, saved: Entries, extent: Extent, name: str) -> "PlainState":
        """Return the live form of a checkpoint's entries; it may share their tensors.

        The entries are those of this part, or of the whole parameter.  Raises ValueError if they do
        not fit.
        """
        header = StateHeader.of(saved, name)
        _check_shape(name, header.shape, extent.shape)
        parameter, entries = header.piece(name), dict(saved)
        for rule in header.algorithm.moments:
            if header.codec is None:
                entries[rule.name] = _part(saved, rule.name, extent)
                continue
            entries |= _local_codes(saved, rule, header.codec, parameter, extent)
        return cls(entries, extent)


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


def _local_codes(
    saved: Entries, rule: MomentRule, codec: Codec, parameter: Piece, extent: Extent
) -> Entries:
    """Return this rank's part of the codes and scales of a loaded moment."""
    code = codec.code_of(rule)
    keys, per_block = (codes_key(rule, code), f"{rule.name}_scale"), code.scale_shape
    grid, rows_of_codes = parameter.grid, extent.code_box(parameter, code.bits)
    shape = grid.code_shape(extent.shape, code.bits)
    codes = _part(saved, keys[0], extent, shape, rows_of_codes)
    if not narrow.has_scales_of_rows(parameter, extent, saved.get(keys[1])):
        shape = (*grid.scale_shape(extent.shape), *per_block)
        scales = _part(saved, keys[1], extent, shape, extent.scale_box(parameter))
        return dict(zip(keys, (codes, scales), strict=True))
    box = narrow.rows(extent)
    scales = _part(saved, keys[1], extent, (extent.shape[0], 1, *per_block), box)
    of_rows = (*rows_of_codes[0], *shape[len(rows_of_codes[0]) :])
    check_entry(f"state entry {keys[0]}", codes, math.prod(of_rows), [torch.uint8])
    num_scales = math.prod((*box[0], *per_block))
    check_entry(f"state entry {keys[1]}", scales, num_scales, [torch.float32])
    codes = codes.reshape(of_rows[0], math.prod(of_rows[1:]))
    scales = scales.reshape(*box[0], *per_block)
    codes, scales = narrow.grouped(code, codes, scales, extent, parameter)
    return dict(zip(keys, (codes.view(of_rows), scales), strict=True))


def _check_is_there(entries: Entries, key: str) -> None:
    if key not in entries:
        raise ValueError(f"state entry {key}: missing; got {shown_keys(entries)}")


def _check_shape(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if got != expected:
        raise ValueError(
            f"state of {name}: got moments of shape {got}, the parameter has {expected}; was the "
            "checkpoint made by another model?"
        )
