# SPDX-License-Identifier: Apache-2.0
"""The state of one parameter, or of a box of it, as it lives in `optimizer.state[p]`.

Entries (tensors and numbers, so that every checkpoint writer can carry them):

    step              int, steps taken
    history           float, bound on m^2/v (equation (S1) of zero8.spec.scalars)
    format            int64 tensor, `zero8.state.header`
    exp_avg_q8, exp_avg_sq_q8          uint8 codes, shaped as the parameter
    exp_avg_scale, exp_avg_sq_scale    float32, shape[:k] + (blocks per row,) + what one block has;
                                       where rows are narrow, groups of which make a block (see
                                       zero8.spec.grid), (groups, 1) + what one block has
    exp_avg, exp_avg_sq                float32 moments, in place of the four above

The names differ from fp32 Adam's where the contents do: a reader that expects float32 moments
finds them missing instead of taking codes for numbers.  Of a box (`zero8.state.extent`) the tensors
are those of the whole parameter as its framework shards them.

Checkpoints (`saved`) carry the same, but (rows, 1) + ... scales of narrow rows, equal ones in a
group: a shard boundary may cut a group, and then each side has scales of its own.  In float32
(`in_float32`) they carry what torch's AdamW would: step, a float32 tensor, exp_avg and exp_avg_sq.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zero8.spec.buffers import check_entry
from zero8.spec.codec import RETIRED, Codec, MomentCode, codec_numbered
from zero8.spec.faults import fault_of_values
from zero8.spec.grid import is_narrow
from zero8.spec.scalars import UNKNOWN_HISTORY
from zero8.spec.shown import shown, shown_keys
from zero8.state import narrow
from zero8.state.extent import Box, Extent, local
from zero8.state.header import MOMENTS, Entries, Header
from zero8.state.reencoded import Reencoded
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable

_OF_ADAMS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes of other Adams' moments."""


@dataclass
class PlainState:
    """The entries of one parameter's state, and the part of the parameter that they are of.

    Attributes:
        entries: see above.
        extent: the part.
    """

    entries: Entries
    extent: Extent

    @classmethod
    def zeros(
        cls, codec: Codec, parameter: Piece, extent: Extent, device: torch.device | str
    ) -> "PlainState":
        """Return the state of a parameter that has taken no step.

        Args:
            codec: the optimizer's.
            parameter: the whole parameter as a piece.
            extent: the part that is here.
            device: where it is.
        """
        table = extent.table(parameter)
        stores = [MomentStore.zeros(codec, which, table, device) for which in MOMENTS]
        return cls.of(stores, parameter, extent, step=0, history=0.0)

    @classmethod
    def of(
        cls,
        stores: list[MomentStore],
        parameter: Piece,
        extent: Extent,
        step: int,
        history: float,
    ) -> "PlainState":
        """Return the state whose moments are the (live) buffers of two stores."""
        entries = described(stores[0].codec, parameter, step, history)
        for store in stores:
            if not parameter.is_quantized:
                entries[store.which] = extent.entry(store.dense, extent.shape, extent.box)
                continue
            entries[f"{store.which}_q8"] = extent.entry(store.codes, extent.shape, extent.box)
            scales, per_block = store.scales, store.code.scale_shape
            if is_narrow(extent.shape):  # no sharding of rows is one of groups
                entries[f"{store.which}_scale"] = scales.view(-1, 1, *per_block)
                continue
            shape = (*parameter.grid.scale_shape(extent.shape), *per_block)
            box = extent.scale_box(parameter)
            entries[f"{store.which}_scale"] = extent.entry(scales, shape, box)
        return cls(entries, extent)

    def stores(self, name: str) -> list[MomentStore]:
        """Return the two live moments, over a segment table whose pieces are called `name`.

        Raises:
            ValueError: if the entries do not describe a state that this version reads.
        """
        header = Header.of(self.entries, name)
        parameter = header.piece(name)
        _check_shape(name, header.shape, self.extent.shape)
        table = self.extent.table(parameter)
        codec = codec_numbered(header.codec) if parameter.is_quantized else None
        return [self._store(codec, which, table) for which in MOMENTS]

    def _store(self, codec: Codec | None, which: str, table: PieceTable) -> MomentStore:
        if codec is None:
            dense = _entry(self.entries, which, torch.float32, table.numel)
            return MomentStore(codec, which, table, dense[:0].byte(), dense[:0], dense)
        per_block = getattr(codec, which).scale_shape
        num_scales = table.num_blocks * math.prod(per_block)
        codes = _entry(self.entries, f"{which}_q8", torch.uint8, table.numel)
        scales = _entry(self.entries, f"{which}_scale", torch.float32, num_scales)
        return MomentStore(codec, which, table, codes, scales.view(-1, *per_block), scales[:0])

    # --- Checkpoints ----------------------------------------------------------------------------

    def saved(self) -> Entries:
        """Return the entries as checkpoints carry them."""
        extent, entries, stores = self.extent, dict(self.entries), self.stores("")
        header, device = Header.of(entries, ""), stores[0].codes.device
        has_groups = header.block_size and is_narrow(header.shape)
        if not has_groups and device.type == "cpu":
            return self.entries
        # torch loads full state dicts if all tensors that have dimensions are on one device.
        entries["format"] = entries["format"].to(device)
        for store in stores if has_groups else ():
            scales = narrow.scales_of_rows(store, extent)
            shape = (extent.shape[0], *scales.shape[1:])
            entries[f"{store.which}_scale"] = extent.entry(scales, shape, narrow.rows(extent))
        return entries

    def in_float32(self) -> Entries:
        """Return the entries of an fp32 Adam; exact, so that they are encoded to the same codes.

        Moments that are float32 are the live ones, as AdamW's.
        """
        extent = self.extent
        entries = {"step": torch.tensor(float(self.entries["step"]), device="cpu")}
        for store in self.stores(""):
            dense = store.dense if store.codec is None else store.read(0, store.table.numel)
            entries[store.which] = extent.entry(dense, extent.shape, extent.box)
        return entries

    @classmethod
    def local(cls, saved: Entries, extent: Extent, name: str) -> "PlainState":
        """Return the live form of what a checkpoint carries; tensors may be the same.

        Args:
            saved: the entries as loaded: of this part, or of the whole parameter.
            extent: the part that is here.
            name: the parameter's.

        Raises:
            ValueError: if they do not fit.
        """
        header = Header.of(saved, name)
        _check_shape(name, header.shape, extent.shape)
        parameter, entries = header.piece(name), dict(saved)
        for which in MOMENTS:
            if not parameter.is_quantized:
                entries[which] = _part(saved, which, extent)
                continue
            codec = codec_numbered(header.codec)
            if codec == RETIRED and is_narrow(extent.shape):
                raise ValueError(
                    f"state of {name}: got codes of {RETIRED.name!r} for rows of "
                    f"{math.prod(extent.shape[1:])} elements, which have none there; the "
                    "checkpoint is damaged"
                )
            entries |= _local_codes(saved, which, getattr(codec, which), parameter, extent)
        return cls(entries, extent)

    @classmethod
    def adopted(
        cls,
        saved: Entries,
        codec: Codec,
        parameter: Piece,
        extent: Extent,
        device: torch.device,
        reencoded: Reencoded,
    ) -> "PlainState":
        """Return a loaded state in tensors of its own, in the form that the optimizer keeps.

        Codes are taken verbatim where codec, block size and policy agree with what was saved, and
        otherwise requantized; float32 moments of another Adam are quantized.

        Args:
            saved: the entries as loaded.
            codec: the optimizer's codec.
            parameter: the whole parameter as a piece, under the optimizer's policy.
            extent: the part that is here.
            device: where it is.
            reencoded: notes the parameter if its codes are requantized.

        Raises:
            ValueError: if they do not fit.
        """
        if is_of_adam(saved):
            return cls._from_adam(saved, codec, parameter, extent, device)
        name = parameter.name
        if missing := [key for key in ("step", "history") if key not in saved]:
            raise ValueError(f"state of {name}: got entries {shown_keys(saved)}, without {missing}")
        step, history = checked_step(saved), checked_history(saved)
        stores = cls.local(saved, extent, name).stores(name)
        for store in stores:
            store.check_values()
        theirs = Header.of(saved, name).piece(name)
        wanted = replace(parameter, identity=theirs.identity)
        if (theirs, stores[0].codec) == (wanted, codec if wanted.block_size else None):
            kept = [store.to(device, copy=True) for store in stores]
            return cls.of(kept, wanted, extent, step, history)
        stores[0].tell_if_retired()
        reencoded.note((stores[0].codec, theirs.block_size), (codec, wanted.block_size))
        new = cls.zeros(codec, wanted, extent, device)
        new._write([store.read(0, store.table.numel) for store in stores])
        return cls({**new.entries, "step": step, "history": history}, extent)

    @classmethod
    def _from_adam(
        cls, saved: Entries, codec: Codec, parameter: Piece, extent: Extent, device: torch.device
    ) -> "PlainState":
        name = parameter.name
        step = checked_step(saved) if "step" in saved else None
        if missing := [key for key in ("step", *MOMENTS) if key not in saved]:
            raise ValueError(
                f"state of {name}: got entries {shown_keys(saved)}, without {missing}; expected "
                "a state of Adam8bitBlockwise or of an fp32 Adam, which "
                'torch.distributed.checkpoint reads through state_dict_format="fp32", not flattened'
            )
        new = cls.zeros(codec, parameter, extent, device)
        moments = []
        for which in MOMENTS:
            values = _part(saved, which, extent)
            check_dense(which, name, values)
            _check_shape(name, tuple(values.shape), extent.local_shape)
            moments.append(values.reshape(-1))
        new._write(moments)
        return cls({**new.entries, "step": step, "history": UNKNOWN_HISTORY}, extent)

    def _write(self, moments: list[Tensor]) -> None:
        for store, values in zip(self.stores(""), moments, strict=True):
            store.write(0, values)


def is_of_adam(saved: Entries) -> bool:
    """Return whether a loaded state is that of an fp32 Adam."""
    # Those that merge a loaded state into ours leave our other entries beside Adam's.
    return bool(saved) and ("format" not in saved or isinstance(saved.get("step"), Tensor))


def described(
    codec: Codec | None, piece: Piece, step: int, history: float = UNKNOWN_HISTORY
) -> Entries:
    """Return the entries of a state besides its moments."""
    number = 0
    if piece.is_quantized:
        assert codec is not None, "8-bit moments are codes of a codec"
        number = codec.number
    header = Header(number, piece.block_size, piece.identity, piece.shape)
    return {"step": step, "history": history, "format": header.packed()}


def checked_step(saved: Entries) -> int:
    """Return the number of steps that a saved state has taken.

    Raises:
        ValueError: if it is not a whole number.
    """
    step = saved["step"]
    try:
        number = int(step)
        valid = 0 <= number < 2**62 and bool(number == step)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # what tensors and others raise
        valid = False
    if not valid:
        raise ValueError(f"state entry step: got {shown(step)}, expected a whole number of steps")
    return number


def checked_history(saved: Entries) -> float:
    """Return the bound on m^2/v of a saved state.

    Raises:
        ValueError: if it is none that a save writes.
    """
    history = saved["history"]
    if type(history) is not float or not 0.0 <= history <= UNKNOWN_HISTORY:
        raise ValueError(
            f"state entry history: got {shown(history)}, expected a float from 0 to "
            f"{UNKNOWN_HISTORY}"
        )
    return history


def check_dense(which: str, owner: str, values: object) -> None:
    """Raise ValueError unless an fp32 Adam's moment is a tensor of finite numbers, v's of no sign.

    Args:
        which: `exp_avg` or `exp_avg_sq`.
        owner: whose moment it is, for messages.
        values: what was loaded.
    """
    name = f"{which} of {owner}"
    if isinstance(values, Tensor) and not values.is_floating_point():
        raise ValueError(f"{name}: got dtype {values.dtype}, expected float32 values")
    numel = values.numel() if isinstance(values, Tensor) else 0
    checked = check_entry(name, values, numel, _OF_ADAMS)
    if found := fault_of_values(which, checked):
        raise ValueError(f"{name}: got {found}; was the checkpoint saved by a run that diverged?")


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
    """Return this rank's part of a loaded entry, which is shaped as the parameter or as said.

    What is no tensor is returned as it is: the check that follows refuses it.
    """
    _check_is_there(saved, key)
    if not isinstance(saved[key], Tensor):
        return saved[key]
    shape, box = shape or extent.shape, box or extent.box
    return extent.part_of(f"state entry {key}", saved[key], shape, box)


def _local_codes(
    saved: Entries, which: str, code: MomentCode, parameter: Piece, extent: Extent
) -> Entries:
    """Return this rank's part of the codes and scales of a loaded moment."""
    keys, per_block = (f"{which}_q8", f"{which}_scale"), code.scale_shape
    codes, grid = _part(saved, keys[0], extent), parameter.grid
    if not narrow.has_scales_of_rows(parameter, extent, saved.get(keys[1])):
        shape = (*grid.scale_shape(extent.shape), *per_block)
        scales = _part(saved, keys[1], extent, shape, extent.scale_box(parameter))
        return dict(zip(keys, (codes, scales), strict=True))
    box = narrow.rows(extent)
    scales = _part(saved, keys[1], extent, (extent.shape[0], 1, *per_block), box)
    check_entry(f"state entry {keys[0]}", codes, extent.numel, [torch.uint8])
    num_scales = math.prod((*box[0], *per_block))
    check_entry(f"state entry {keys[1]}", scales, num_scales, [torch.float32])
    codes, scales = codes.reshape(extent.local_shape), scales.reshape(*box[0], *per_block)
    grouped = narrow.grouped(code, codes, scales, extent, parameter.block_size)
    return dict(zip(keys, grouped, strict=True))


def _check_is_there(entries: Entries, key: str) -> None:
    if key not in entries:
        raise ValueError(f"state entry {key}: missing; got {shown_keys(entries)}")


def _check_shape(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if got != expected:
        raise ValueError(
            f"state of {name}: got moments of shape {got}, the parameter has {expected}; was the "
            "checkpoint made by another model?"
        )
