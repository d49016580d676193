# SPDX-License-Identifier: Apache-2.0
"""Copies of parameters in 16 bits, which the CPU's kernel writes as it steps."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from zero8.op.kernel import COPY_DTYPES, CPU
from zero8.op.structs import DTYPE_NUMBERS
from zero8.spec.buffers import check_buffer

_COPY_BYTES = 2


def set_copies(
    records: np.ndarray, kept: np.ndarray, params: Sequence[Tensor], copies: Mapping[Tensor, Tensor]
) -> list[Tensor]:
    """Set the copies that a step over contiguous parameters on the CPU writes.

    Args:
        records: (pieces,) `SEGMENT`.
        kept: (pieces,) `KEPT_PIECE`.
        params: the parameters that the records refer to.
        copies: for some of them, a contiguous tensor of as many elements, bfloat16 or, for float32
            parameters, float16.

    Returns:
        The parameters whose copies the step writes.

    Raises:
        ValueError: if a copy has another size, dtype, layout or device.
    """
    addresses, dtypes = np.zeros(len(params), np.uint64), np.zeros(len(params), np.int32)
    for place, p in enumerate(params):
        if (copy := copies.get(p)) is not None:
            check_buffer("copy", copy, p.numel(), COPY_DTYPES[p.dtype], CPU)
            addresses[place], dtypes[place] = copy.data_ptr(), DTYPE_NUMBERS[copy.dtype]
    owner = kept["owner"]
    is_float32 = records["param_dtype"] == DTYPE_NUMBERS[torch.float32]
    offsets = kept["param_offset"] // np.where(is_float32, 4, 2).astype(np.uint64) * _COPY_BYTES
    has_copy = addresses[owner] != 0
    records["copy"] = np.where(has_copy, addresses[owner] + offsets, 0)
    records["copy_dtype"] = np.where(has_copy, dtypes[owner], 0)
    written = np.unique(owner[has_copy]).tolist()
    return [params[place] for place in written]
