# SPDX-License-Identifier: Apache-2.0
"""The state of one whole parameter, as it lives in `optimizer.state[p]` and in checkpoints.

Entries (plain tensors and numbers, so that every checkpoint writer can carry them):

    step              int, steps taken
    history           float, bound on m^2/v (equation (S1) of zero8.spec.scalars)
    format            int64 tensor, `zero8.state.header`
    exp_avg_q8, exp_avg_sq_q8          uint8 codes, shaped as the parameter
    exp_avg_scale, exp_avg_sq_scale    float32, shape[:k] + (blocks per row,) + what one block has;
                                       where rows are narrow, groups of which make a block (see
                                       zero8.spec.grid), (groups, 1) + what one block has
    exp_avg, exp_avg_sq                float32 moments, in place of the four above

The names differ from fp32 Adam's where the contents do: a reader that expects float32 moments
finds them missing instead of taking codes for numbers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zero8.spec.buffers import check_entry
from zero8.spec.codec import Codec, codec_numbered
from zero8.spec.scalars import UNKNOWN_HISTORY
from zero8.state.header import MOMENTS, Header
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable


@dataclass
class PlainState:
    """The entries of one whole parameter's state."""

    entries: dict

    @classmethod
    def zeros(cls, codec: Codec, piece: Piece, device: torch.device | str) -> "PlainState":
        """Return the state of a parameter that has taken no step."""
        table = PieceTable((piece,), piece.numel)
        stores = [MomentStore.zeros(codec, which, table, device) for which in MOMENTS]
        return cls.of(stores, step=0, history=0.0)

    @classmethod
    def of(cls, stores: list[MomentStore], step: int, history: float) -> "PlainState":
        """Return the state whose moments are the (live) buffers of two one-piece stores."""
        (piece,) = stores[0].table.pieces
        entries = described(stores[0].codec, piece, step, history)
        for store in stores:
            if piece.is_quantized:
                entries[f"{store.which}_q8"] = store.codes.view(piece.shape)
                scale_shape = piece.grid.scale_shape(piece.shape)
                per_block = store.scales.shape[1:]
                entries[f"{store.which}_scale"] = store.scales.view(*scale_shape, *per_block)
            else:
                entries[store.which] = store.dense.view(piece.shape)
        return cls(entries)

    def stores(self, name: str) -> list[MomentStore]:
        """Return the two live moments, over a segment table whose one piece is called `name`.

        Raises:
            ValueError: if the entries do not describe a state that this version reads.
        """
        header = Header.of(self.entries, name)
        piece = header.piece(name)
        table = PieceTable((piece,), piece.numel)
        codec = codec_numbered(header.codec) if piece.is_quantized else None
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

    @classmethod
    def adopted(
        cls, saved: dict, codec: Codec, target: Callable[[int | None], Piece], device: torch.device
    ) -> "PlainState":
        """Return a loaded state in tensors of its own, in the form that the optimizer keeps.

        Codes are taken verbatim where codec, block size and policy agree with what was saved, and
        otherwise requantized; float32 moments of another Adam are quantized.

        Args:
            saved: the entries as loaded.
            codec: the optimizer's codec.
            target: returns the parameter's piece under the optimizer's policy, with the identity
                given, or its own for None.
            device: where the parameter is.
        """
        if "format" not in saved:
            return cls._from_adam(saved, codec, target(None), device)
        name = target(None).name
        if missing := [key for key in ("step", "history") if key not in saved]:
            raise ValueError(f"state of {name}: got entries {sorted(saved)}, without {missing}")
        stores = cls(saved).stores(name)
        table = stores[0].table
        step, history = checked_step(saved), checked_history(saved)
        wanted = target(table.pieces[0].identity)
        _check_shape(name, table.pieces[0].shape, wanted.shape)
        if (table.pieces[0], stores[0].codec) == (wanted, codec if wanted.block_size else None):
            kept = [store.to(device, copy=True) for store in stores]
            return cls.of(kept, step, history)
        stores[0].tell_if_retired()
        new = cls.zeros(codec, wanted, device)
        new._write([store.read(0, table.numel) for store in stores])
        return cls({**new.entries, "step": step, "history": history})

    @classmethod
    def _from_adam(
        cls, saved: dict, codec: Codec, wanted: Piece, device: torch.device
    ) -> "PlainState":
        if missing := [key for key in ("step", *MOMENTS) if key not in saved]:
            raise ValueError(
                f"state of {wanted.name}: got entries {sorted(saved)}, without {missing}; expected "
                "a state of Adam8bitBlockwise or of an fp32 Adam"
            )
        new = cls.zeros(codec, wanted, device)
        for which in MOMENTS:
            check_dense(f"{which} of {wanted.name}", saved[which])
            _check_shape(wanted.name, tuple(saved[which].shape), wanted.shape)
        step = checked_step(saved)
        new._write([saved[which].reshape(-1) for which in MOMENTS])
        return cls({**new.entries, "step": step, "history": UNKNOWN_HISTORY})

    def _write(self, moments: list[Tensor]) -> None:
        for store, values in zip(self.stores(""), moments, strict=True):
            store.write(0, values)


def described(codec: Codec, piece: Piece, step: int, history: float = UNKNOWN_HISTORY) -> dict:
    """Return the entries of a state besides its moments."""
    number = codec.number if piece.is_quantized else 0
    header = Header(number, piece.block_size, piece.identity, piece.shape)
    return {"step": step, "history": history, "format": header.packed()}


def checked_step(saved: dict) -> int:
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
        raise ValueError(f"state entry step: got {step!r}, expected a whole number of steps")
    return number


def checked_history(saved: dict) -> float:
    """Return the bound on m^2/v of a saved state.

    Raises:
        ValueError: if it is not a number.
    """
    history = saved["history"]
    if type(history) not in (int, float) or not 0.0 <= history <= UNKNOWN_HISTORY:
        raise ValueError(f"state entry history: got {history!r}, expected a number of at least 0")
    return float(history)


def check_dense(name: str, values: object) -> None:
    """Raise ValueError unless an fp32 Adam's moment is a tensor of real numbers in memory."""
    if isinstance(values, Tensor) and not values.is_floating_point():
        raise ValueError(f"{name}: got dtype {values.dtype}, expected float32 values")
    numel, dtype = (values.numel(), values.dtype) if isinstance(values, Tensor) else (0, None)
    check_entry(name, values, numel, [dtype])


def _entry(entries: dict, key: str, dtype: torch.dtype, numel: int) -> Tensor:
    if key not in entries:
        raise ValueError(f"state entry {key}: missing; got {sorted(entries)}")
    check_entry(f"state entry {key}", entries[key], numel, [dtype])
    return entries[key].reshape(-1)


def _check_shape(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if got != expected:
        raise ValueError(
            f"state of {name}: got moments of shape {got}, the parameter has {expected}; was the "
            "checkpoint made by another model?"
        )
