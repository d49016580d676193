# SPDX-License-Identifier: Apache-2.0
"""Reads weights of torchao's classes (`zero8.state.weights`) from files of `torch.save`.

INT8 weights are decoded to float32; the others hold a tensor with the values.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from zero8.checkpoint.read.inert import Inert
from zero8.spec.int8_rows import SCALE_DTYPES, are_rows, decoded
from zero8.spec.shown import shown
from zero8.state.weights import INSIDE, INT8_ROWS


def reader_of(name: object, saved: object) -> Callable[[], Tensor] | None:
    """Return what returns a weight, None if it is of another class.

    Args:
        name: of the parameter.
        saved: the weight as `zero8.checkpoint.read.safe_load` returns it.

    Raises:
        ValueError: if a weight of torchao lacks its tensors, or they do not fit together.
    """
    if isinstance(saved, Tensor):
        return partial(_itself, saved)
    if not isinstance(saved, Inert) or not saved.name.startswith("torchao."):
        return None
    kind, parts = saved.name.rpartition(".")[2], saved.state
    if kind not in (INT8_ROWS, *INSIDE):
        return None
    if not isinstance(parts, dict):
        raise ValueError(f"{shown(name)}: got a weight of torchao's {kind} without its tensors")
    if kind == INT8_ROWS:
        return _int8_reader(name, parts.get("int_data"), parts.get("scale"))
    values = parts.get(INSIDE[kind])
    if not isinstance(values, Tensor):
        raise ValueError(f"{shown(name)}: got a weight of torchao's {kind} without {INSIDE[kind]}")
    return partial(_itself, values)


def _int8_reader(name: object, codes: object, scales: object) -> Callable[[], Tensor]:
    if isinstance(codes, Tensor) and isinstance(scales, Tensor):
        if are_rows((codes.shape, codes.dtype), (scales.shape, scales.dtype)):
            return partial(decoded, codes, scales)
    raise ValueError(
        f"{shown(name)}: got int_data {_described(codes)} and scale {_described(scales)}, expected "
        f"int8 of 2 dimensions and one scale per row in one of {list(SCALE_DTYPES)}"
    )


def _described(part: object) -> str:
    is_tensor = isinstance(part, Tensor)
    return f"of shape {tuple(part.shape)}, {part.dtype}" if is_tensor else f"{shown(part)}"


def _itself(values: Tensor) -> Tensor:
    return values
