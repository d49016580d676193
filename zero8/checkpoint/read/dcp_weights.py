# SPDX-License-Identifier: Apache-2.0
"""Finds weights of torchao's classes in folders of torch.distributed.checkpoint.

Trainings save the tensors that these weights are made of (`zero8.state.weights`), as NAME.part:
codes and scales of INT8 weights, which torch.distributed.checkpoint cannot save otherwise, and the
values inside the others.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zero8.spec.int8_rows import SCALE_DTYPES, are_rows
from zero8.state.weights import INSIDE


class Int8Keys(NamedTuple):
    """The keys of the two tensors of an INT8 weight."""

    codes: str
    scales: str


def int8_keys(entries: Mapping[str, object], key: str) -> Int8Keys | None:
    """Return the keys of the tensors of an INT8 weight, None if the weight is saved otherwise.

    Args:
        entries: those of the folder.
        key: of the weight of a parameter.

    Raises:
        ValueError: if one of the two tensors is missing, or they do not fit together.
    """
    keys = Int8Keys(f"{key}.int_data", f"{key}.scale")
    missing = [one for one in keys if one not in entries]
    if key in entries or len(missing) == len(keys):
        return None
    if missing:
        (found,) = set(keys) - set(missing)
        raise ValueError(
            f"{key}: got {found} without {missing[0]}, expected both tensors of an INT8 weight; "
            "save both"
        )
    _check_fit(key, entries[keys.codes], entries[keys.scales])
    return keys


def key_of_values(entries: Mapping[str, object], key: str) -> str:
    """Return the key of the tensor with a weight's values: `key`, or that of its part.

    Args:
        entries: those of the folder.
        key: of the weight of a parameter.
    """
    parts = [key, *(f"{key}.{part}" for part in INSIDE.values())]
    return next((one for one in parts if one in entries), key)


def _check_fit(key: str, *parts: TensorStorageMetadata) -> None:
    codes, scales = ((tuple(part.size), part.properties.dtype) for part in parts)
    if are_rows(codes, scales):
        return
    raise ValueError(
        f"{key}: got int_data of shape {codes[0]}, {codes[1]}, and scale of shape {scales[0]}, "
        f"{scales[1]}, expected int8 of 2 dimensions and one scale per row in one of "
        f"{list(SCALE_DTYPES)}; save both as they are in torchao's weight"
    )
