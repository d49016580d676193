# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors that a step writes for a parameter whose class wraps them.

torchao's classes for training in low precision are tensors without memory of their own, around one
tensor that has the values (INT8 matmuls, BitNet, float8), or around int8 rows and their scales
(`zero8.spec.int8_rows`).  They are known by name, so that nothing imports torchao.
"""

from typing import Any, NamedTuple

from torch import Tensor

from zero8.state.extent import NEVER_SHARDED, local

INSIDE = {
    "Int8MixedPrecisionTrainingLinearWeight": "_data",
    "BitNetTrainingLinearWeight": "_data",
    "WeightWithDynamicFloat8CastTensor": "_tensor",
}
"""The attribute with the values, by class of torchao."""

INT8_ROWS = "Int8QuantizedTrainingLinearWeight"
"""The class of int8 rows, in `int_data`, and their scales, in `scale`."""

CLASSES = (INT8_ROWS, *INSIDE)
"""The names of the classes."""


class Int8Rows(NamedTuple):
    """The tensors of INT8 weights on this rank.

    Attributes:
        codes: (rows, columns) int8.
        scales: (rows,) in the dtype that the parameter shows, and its gradients have.
    """

    codes: Tensor
    scales: Tensor


def int8_rows(p: Tensor) -> Int8Rows | None:
    """Return the tensors of a parameter of INT8 weights, None of others."""
    if type(p) in NEVER_SHARDED:  # most are; saves the calls
        return None
    here: Any = local(p)
    return Int8Rows(here.int_data, here.scale) if class_in_torchao(here) == INT8_ROWS else None


def rows_of(p: Tensor) -> Int8Rows:
    """Return the tensors of a parameter that is known to have INT8 weights."""
    rows = int8_rows(p)
    assert rows is not None, "values_of returns int8 codes for INT8 weights alone"
    return rows


def values_of(p: Tensor) -> Tensor:
    """Return the tensor with a parameter's values on this rank; of INT8 weights, the codes."""
    if type(p) in NEVER_SHARDED:
        return p
    here: Any = local(p)
    name = class_in_torchao(here)
    if name == INT8_ROWS:
        codes: Tensor = here.int_data
        return codes
    values: Tensor = getattr(here, INSIDE[name]) if name in INSIDE else here
    return values


def class_in_torchao(p: Tensor) -> str | None:
    """Return the name of the class of a local tensor if it is one of `CLASSES` of torchao."""
    cls = type(p)
    is_known = cls.__module__.startswith("torchao.") and cls.__name__ in CLASSES
    return cls.__name__ if is_known else None
