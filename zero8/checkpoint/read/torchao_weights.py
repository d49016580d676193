# SPDX-License-Identifier: Apache-2.0
"""Weights of torchao's classes (`zero8.state.weights`), read by the tensors that they are made of.

A file of `torch.save` has them in an object of the class.  torch.distributed.checkpoint cannot save
that, so trainings save them there as NAME.part.  INT8 weights are decoded; the others hold a tensor
with the values.
"""

from collections.abc import Mapping

from torch import Tensor

from zero8.checkpoint.read.inert import Inert
from zero8.spec.int8_rows import SCALE_DTYPES, are_rows, decoded
from zero8.spec.shown import shown
from zero8.state.weights import INSIDE, INT8_ROWS

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
