# SPDX-License-Identifier: Apache-2.0
"""What `zero8.op.kernel.described` says of a tensor, in Python: for torch before 2.10."""

import numpy as np
import torch
from torch import Tensor

from zero8.op.structs import MAX_HASHED, WITHOUT_MEMORY


def described(one: Tensor | float) -> tuple[int, int, int, bool, int]:
    """Return the record of a tensor or a number."""
    if not isinstance(one, Tensor):
        return 0, 0, 0, True, 0
    try:
        data = one.data_ptr()
    except RuntimeError:
        return 0, 0, WITHOUT_MEMORY, False, 0
    kind = (hash(one.device) & 0x7FFFFFFF) << 32 | hash(one.dtype) & 0xFFFFFFFF
    return data, one.numel(), kind, one.is_contiguous(), _contents_of(one)


def is_same(records: np.ndarray, before: np.ndarray, addresses: np.ndarray) -> bool:
    """Do what the op's `describe_again` does."""
    if len(records) != len(before):
        return False
    first = records[: len(addresses)]
    if ((first["data"] == 0) & (first["numel"] > 0)).any():
        return False
    addresses[:] = first["data"]
    first["data"] = before["data"][: len(addresses)]
    return records.tobytes() == before.tobytes()


def _contents_of(tensor: Tensor) -> int:
    is_hashed = tensor.dtype == torch.int64 and tensor.device.type == "cpu" and tensor.data_ptr()
    if not is_hashed or not tensor.is_contiguous() or tensor.numel() > MAX_HASHED:
        return 0
    return hash(tensor.numpy().tobytes())
