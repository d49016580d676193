# SPDX-License-Identifier: Apache-2.0
"""Copies of float32 parameters in 16 bits, which the CPU's kernel writes as it steps."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from zero8.op.kernel import CPU
from zero8.op.structs import DTYPE_NUMBERS
from zero8.spec.buffers import check_buffer

_FLOAT32_BYTES, _COPY_BYTES = 4, 2


def set_copies(
    records: np.ndarray, kept: np.ndarray, params: Sequence[Tensor], copies: Mapping[Tensor, Tensor]
) -> list[Tensor]:
    """Set the copies that a step over contiguous parameters on the CPU writes.

    Args:
        records: (pieces,) `SEGMENT`, of float32 parameters or of others.
        kept: (pieces,) `KEPT_PIECE`.
        params: the parameters that the records refer to.
        copies: for some of them, a contiguous bfloat16 or float16 tensor of as many elements.

    Returns:
        The parameters whose copies the step writes: float32 ones.

    Raises:
        ValueError: if a copy has another size, dtype, layout or device.
    """
    addresses, dtypes = np.zeros(len(params), np.uint64), np.zeros(len(params), np.int32)
    for place, p in enumerate(params):
        if (copy := copies.get(p)) is not None:
            check_buffer("copy", copy, p.numel(), (torch.bfloat16, torch.float16), CPU)
            addresses[place], dtypes[place] = copy.data_ptr(), DTYPE_NUMBERS[copy.dtype]
    owner = kept["owner"]
    is_served = records["param_dtype"] == DTYPE_NUMBERS[torch.float32]
    offsets = kept["param_offset"] // _FLOAT32_BYTES * _COPY_BYTES
    has_copy = is_served & (addresses[owner] != 0)
    records["copy"] = np.where(has_copy, addresses[owner] + offsets, 0)
    records["copy_dtype"] = np.where(has_copy, dtypes[owner], 0)
    written = np.unique(owner[has_copy]).tolist()
    return [params[place] for place in written]
