# SPDX-License-Identifier: Apache-2.0
"""8-bit AdamW states of bitsandbytes and torchao, from and to zero8's codecs.

Both keep a moment as codes and one float32 scale per block of the flattened parameter, which zero8
divides by rows, or groups of narrow ones.  Where the blocks coincide, import keeps codes and
scales; otherwise moments are decoded to float32, and quantized by the optimizer that loads them.

    bitsandbytes' AdamW8bit     `dynamic`, blocks of 256; the scale of m is the largest magnitude,
                                in zero8 the extreme element with its sign
    torchao's AdamW8bit         `dynamic`
    torchao's AdamWFp8          `fp8`, which has a code for -0
    torchao's AdamW4bit         `linear4`, whose codes count from another entry, two to a byte

torchao's moments are tensors of its classes, read as `zero8.checkpoint.read.inert.Inert`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zero8.checkpoint.read.inert import Inert
from zero8.spec import dither
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, dequantize
from zero8.spec.grid import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE, BlockGrid
from zero8.spec.levels import NearestEntry
from zero8.spec.packing import packed
from zero8.spec.shown import shown
from zero8.state.extent import Extent
from zero8.state.header import StateHeader
from zero8.state.memory import unknown_memory
from zero8.state.plain import saved_form, stores_of
from zero8.state.store import MomentStore
from zero8.state.table import Piece
from zero8.state.target import Target

BLOCK_SIZE = 256
"""Of bitsandbytes."""
_KEYS = {"exp_avg": ("state1", "absmax1", "qmap1"), "exp_avg_sq": ("state2", "absmax2", "qmap2")}
_TORCHAO = {"OptimState8bit": "dynamic", "OptimStateFp8": "fp8", "OptimState4bit": "linear4"}
_SHARED = ("params", "param_names", "lr", "betas", "eps", "weight_decay")
"""The options of the libraries' AdamW that zero8's has; torchao's learning rate is a tensor."""


class Coded(NamedTuple):
    """A moment: codes shaped as the parameter, a uint8 each, and the scales of flat blocks."""

    codec: str
    block_size: int
    codes: Tensor
    scales: Tensor

    def __str__(self) -> str:
        """Return what both moments of a state must share."""
        return f"{self.codec} of shape {tuple(self.codes.shape)} in blocks of {self.block_size}"


def is_foreign(state: object) -> bool:
    """Return whether the state of a parameter is of one of the libraries."""
    return isinstance(state, dict) and ("state1" in state or any(map(_class_of, state.values())))


def from_foreign(state_dict: dict) -> dict:
    """Return a state dict for `Adam8bitBlockwise(codec=...).load_state_dict`.

    Args:
        state_dict: of `bitsandbytes.optim.AdamW8bit`, or of an AdamW of `torchao.optim` as read by
            `zero8.checkpoint.read.safe_load`; the module has the codec of each.

    Raises:
        ValueError: for classes, maps or sizes that it does not know.
    """
    states = {index: _imported(index, state) for index, state in state_dict["state"].items()}
    groups = [
        {k: x.item() if isinstance(x, Tensor) else x for k, x in group.items() if k in _SHARED}
        for group in state_dict["param_groups"]
    ]
    return {"state": states, "param_groups": groups}


def _imported(index: int, state: dict) -> dict:
    read = _of_bitsandbytes if "state1" in state else _of_torchao
    m, v = (read(name, state) for name in ADAM.moment_names)
    step = {"step": int(state["step"])}
    if isinstance(m, Tensor) and isinstance(v, Tensor):
        return {**step, "exp_avg": m.float(), "exp_avg_sq": v.float()}
    got, expected = ("float32" if isinstance(x, Tensor) else str(x) for x in (v, m))
    if got != expected:
        raise ValueError(f"exp_avg_sq: got {got}, expected {expected} as exp_avg has")
    moments = {"exp_avg": m, "exp_avg_sq": v}
    shape, codec, size = tuple(m.codes.shape), CODECS[m.codec], m.block_size
    if not _coincide(shape, size):
        return step | {name: _decoded(name, x) for name, x in moments.items()}
    piece = Piece(0, m.codes.numel(), 0, shape, dither.identity_of(index), size, str(index))
    extent, stores = Extent.whole(shape), []
    for name, (_, _, codes, scales) in moments.items():
        rule, table = ADAM.moment(name), extent.table(piece)
        stored = packed(codes.reshape(-1), piece.grid, 0, codec.code_of(rule).bits)
        stores.append(MomentStore(codec, rule, table, stored, scales, scales[:0]))
    numbers = step | unknown_memory(ADAM)
    return saved_form(Target(ADAM, codec, piece, extent).entries_of(stores, numbers), extent)


def _decoded(name: str, moment: Coded) -> Tensor:
    code, codes = CODECS[moment.codec].code_of(ADAM.moment(name)), moment.codes.reshape(-1)
    block = _block_numbers(codes, moment.block_size)
    return dequantize(code, codes, moment.scales, block).view(moment.codes.shape)


def _block_numbers(x: Tensor, block_size: int) -> Tensor:
    return torch.arange(x.numel(), dtype=torch.int64, device=x.device) // block_size


def _coincide(shape: tuple[int, ...], size: int) -> bool:
    """Return whether flat blocks are those of zero8."""
    is_size = MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE and size & size - 1 == 0
    grid = BlockGrid.of(shape, size) if is_size else None
    return grid is not None and grid.row_length % size == 0


def _checked(name: str, moment: Coded, levels: Tensor | None) -> Coded:
    codes, scales = moment.codes, moment.scales
    if codes.dtype != torch.uint8 or scales.dtype != torch.float32 or scales.ndim != 1:
        raise ValueError(f"{name}: got codes or scales of an unknown type")
    if scales.numel() != -(-codes.numel() // moment.block_size):
        raise ValueError(
            f"{name}: got {scales.numel()} scales of {codes.numel()} codes, expected one for each "
            "block of equal size"
        )
    code = CODECS[moment.codec].code_of(ADAM.moment(name))
    if isinstance(code, NearestEntry):
        ours, theirs = code.entries, levels.float().cpu()
        # Without AVX2, torch rounds some entries of the libraries' maps differently.
        if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=2.0**-20, atol=0.0):
            raise ValueError(f"{name}: got a map that is not that of {moment.codec}")
    return moment


# --- bitsandbytes -------------------------------------------------------------------------------


def _of_bitsandbytes(name: str, state: dict) -> Coded | Tensor:
    codes, scales, levels = map(state.get, _KEYS[name])
    if scales is None:
        return codes
    return _checked(name, Coded("dynamic", BLOCK_SIZE, codes, scales), levels)


def to_bitsandbytes(state_dict: dict) -> dict:
    """Return a state dict for `bitsandbytes.optim.AdamW8bit.load_state_dict`.

    Every block is encoded again, within half a code.  With `dynamic`, where the blocks coincide,
    that changes only blocks of m whose largest element is negative.

    Args:
        state_dict: of `Adam8bitBlockwise`; any codec and block size.

    Raises:
        ValueError: if a state is of another optimizer.
    """
    states = {index: _exported(state) for index, state in state_dict["state"].items()}
    return {"state": states, "param_groups": state_dict["param_groups"]}


def _exported(state: dict) -> dict:
    header = StateHeader.of(state, "")
    if header.algorithm is not ADAM:
        raise ValueError(
            f"got a state of {header.algorithm.class_name}, expected one of {ADAM.class_name}, for "
            "bitsandbytes' AdamW8bit"
        )
    shape, size = header.shape, header.block_size
    exported: dict = {"step": int(state["step"])}
    if size == 0:
        return exported | {_KEYS[name][0]: state[name] for name in ADAM.moment_names}
    for store in stores_of(state, Extent.whole(shape), ""):
        code, values = CODECS["dynamic"].code_of(store.rule), store.read(0, store.table.numel)
        block = _block_numbers(values, BLOCK_SIZE)
        scales = code.scales(values, block, int(block[-1]) + 1).abs()
        codes = code.encode(values, scales[block], None)
        entries = (codes.view(shape), scales, code.levels.to(codes.device, copy=True))
        exported |= dict(zip(_KEYS[store.name], entries, strict=True))
    return exported


# --- torchao ------------------------------------------------------------------------------------


def _class_of(moment: object) -> str:
    """Return the name of torchao's class, "" for anything else."""
    is_torchao = isinstance(moment, Inert) and moment.name.startswith("torchao.")
    return moment.name.rpartition(".")[2] if is_torchao else ""


def _of_torchao(name: str, state: dict) -> Coded | Tensor:
    moment = state[name]
    kind = _class_of(moment)
    if not kind:
        return moment
    if kind not in _TORCHAO:
        raise ValueError(f"{name}: got torchao's {shown(kind)}, expected one of {list(_TORCHAO)}")
    held, codec = moment.state, _TORCHAO[kind]
    codes, scales = held["codes"], held["scale"]
    if codec == "fp8":
        codes = codes.view(torch.uint8) if codes.itemsize == 1 else codes
        codes = torch.where(codes == 128, 0, codes)  # -0
    elif codec == "linear4":
        shape = held["_shape"]
        if not isinstance(shape, torch.Size) or codes.shape != (shape.numel() // 2,):
            raise ValueError(f"{name}: got {codes.numel()} bytes of codes of shape {shown(shape)}")
        codes = torch.stack([codes >> 4, codes & 15], 1).view(shape)
    size = codes.numel() // max(1, scales.numel())
    made = _checked(name, Coded(codec, size, codes, scales), held.get("qmap"))
    code = CODECS[codec].code_of(ADAM.moment(name))
    if not isinstance(code, NearestEntry):
        return made
    return made._replace(codes=codes - code.first & (1 << code.bits) - 1)
