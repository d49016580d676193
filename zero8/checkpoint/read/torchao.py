# SPDX-License-Identifier: Apache-2.0
"""Converts states of torchao's AdamW8bit, AdamWFp8 and AdamW4bit to zero8's codecs.

They keep moments as tensors of their own classes, which hold codes and one float32 scale per block
of the flattened parameter.  The maps of 8 bits are those of `dynamic`, the codes of FP8 those of
`fp8`, the maps of 4 bits those of `linear4`, whose codes count from another entry.  Where the
blocks are zero8's (`zero8.checkpoint.read.flat_blocks`), import keeps codes and scales; otherwise
moments are decoded to float32, and quantized by the optimizer that loads them.

Weights of torchao's classes (`zero8.state.weights`) are read by the tensors that they are made of.
A file of `torch.save` has them in an object of the class.  torch.distributed.checkpoint cannot save
that, so trainings save them there as NAME.part.  INT8 weights are decoded; the others hold a tensor
with the values.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from zero8.checkpoint.read.flat_blocks import imported, is_map_of, options_of
from zero8.checkpoint.read.inert import Inert
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS
from zero8.spec.int8_rows import SCALE_DTYPES, are_rows, decoded
from zero8.spec.levels import NearestEntry
from zero8.spec.shown import shown
from zero8.state.weights import INSIDE, INT8_ROWS

_CODECS = {
    "OptimState8bit": CODECS["dynamic"],
    "OptimStateFp8": CODECS["fp8"],
    "OptimState4bit": CODECS["linear4"],
}
_NEGATIVE_ZERO = 128


def is_of_torchao(state: object) -> bool:
    """Return whether the state of a parameter has moments of torchao's classes."""
    return isinstance(state, dict) and any(_class_of(x) for x in state.values())


def from_torchao(state_dict: dict) -> dict:
    """Return a state dict for `Adam8bitBlockwise` with the codec of the states.

    It is one of `torchao.optim.AdamW8bit`, `AdamWFp8` or `AdamW4bit`, read by
    `zero8.checkpoint.read.safe_load`.  Raises ValueError if classes, maps or sizes are others.
    """
    states = {index: _imported(index, state) for index, state in state_dict["state"].items()}
    return {"state": states, "param_groups": [*map(options_of, state_dict["param_groups"])]}


def _class_of(moment: object) -> str:
    """Return the name of torchao's class, "" for anything else."""
    if not isinstance(moment, Inert) or not moment.name.startswith("torchao."):
        return ""
    return moment.name.rpartition(".")[2]


def _imported(index: int, state: dict) -> dict:
    step, kind = int(state["step"]), _class_of(state["exp_avg"])
    if not kind:
        return {"step": step, **{name: state[name].float() for name in ADAM.moment_names}}
    if kind not in _CODECS:
        expected = sorted(_CODECS)
        raise ValueError(f"got moments of torchao's {shown(kind)}, expected one of {expected}")
    moments = {name: _checked(name, kind, state[name]) for name in ADAM.moment_names}
    codes, scales = moments["exp_avg"]
    for name, (others, _) in moments.items():
        if others.shape != codes.shape:
            got = f"got codes of shape {tuple(others.shape)}"
            raise ValueError(f"{name}: {got}, expected {tuple(codes.shape)} as exp_avg has")
    size, other = (c.numel() // s.numel() for c, s in moments.values())
    if size != other:
        raise ValueError(f"exp_avg_sq: got blocks of {other}, expected {size} as exp_avg has")
    return imported(index, step, _CODECS[kind], size, moments)


def _checked(name: str, kind: str, moment: Inert) -> tuple[Tensor, Tensor]:
    """Return the codes of a moment, shaped as the parameter, a byte each, and the scales."""
    if _class_of(moment) != kind:
        raise ValueError(f"{name}: got {shown(_class_of(moment))}, expected {kind} as exp_avg has")
    held = moment.state
    codes, scales = held["codes"], held["scale"]
    if codes.dtype == torch.float8_e4m3fn:
        codes = codes.view(torch.uint8)
    if codes.dtype != torch.uint8 or scales.dtype != torch.float32 or scales.ndim != 1:
        raise ValueError(f"{name}: got codes or scales of an unknown type")
    if kind == "OptimState4bit":
        codes = _bytes_of(name, codes, held["_shape"])
    if not scales.numel() or codes.numel() % scales.numel():
        raise ValueError(
            f"{name}: got {scales.numel()} scales of {codes.numel()} codes, expected equal blocks"
        )
    if kind == "OptimStateFp8":
        return torch.where(codes == _NEGATIVE_ZERO, 0, codes), scales
    code = _CODECS[kind].code_of(ADAM.moment(name))
    assert isinstance(code, NearestEntry), "other codes have no map"
    if not is_map_of(code, held["qmap"]):
        raise ValueError(f"{name}: got a map that is not that of {_CODECS[kind].name}")
    return codes - code.first & (1 << code.bits) - 1, scales


def _bytes_of(name: str, codes: Tensor, shape: object) -> Tensor:
    """Return a byte for each of the codes of 4 bits, two to a byte, of a parameter of a shape."""
    if not isinstance(shape, torch.Size) or codes.ndim != 1 or shape.numel() != 2 * codes.numel():
        raise ValueError(f"{name}: got {codes.numel()} bytes of codes of shape {shown(shape)}")
    return torch.stack([codes >> 4, codes & 15], 1).view(shape)


# --- Weights --------------------------------------------------------------------------------------

CODES, SCALES = "int_data", "scale"
PARTS = (CODES, SCALES, *dict.fromkeys(INSIDE.values()))
"""The names of the tensors."""


def is_weight(saved: object) -> bool:
    """Return whether a value in a file of `torch.save` is a weight that `values_of` reads."""
    if not isinstance(saved, Inert) or not saved.name.startswith("torchao."):
        return isinstance(saved, Tensor)
    return saved.name.rpartition(".")[2] in (INT8_ROWS, *INSIDE)


def values_of(name: object, saved: Tensor | Inert) -> Tensor:
    """Return the values of a weight in a file of `torch.save`."""
    if isinstance(saved, Tensor):
        return saved
    return weight_of(name, saved.state if isinstance(saved.state, dict) else {})


def weight_of(name: object, parts: Mapping[str, object]) -> Tensor:
    """Return the values of a weight from its tensors, by their names in `PARTS`."""
    if CODES not in parts and SCALES not in parts:
        values = next((parts[part] for part in PARTS if part in parts), None)
        if not isinstance(values, Tensor):
            raise ValueError(f"{shown(name)}: got a weight of torchao's without its tensors")
        return values
    codes, scales = parts.get(CODES), parts.get(SCALES)
    if isinstance(codes, Tensor) and isinstance(scales, Tensor):
        if are_rows((codes.shape, codes.dtype), (scales.shape, scales.dtype)):
            return decoded(codes, scales)
    raise ValueError(
        f"{shown(name)}: got int_data {_described(codes)} and scale {_described(scales)}, expected "
        f"int8 of 2 dimensions and one scale per row in one of {list(SCALE_DTYPES)}; save both as "
        "they are in torchao's weight"
    )


def _described(part: object) -> str:
    is_tensor = isinstance(part, Tensor)
    return f"of shape {tuple(part.shape)}, {part.dtype}" if is_tensor else f"{shown(part)}"
