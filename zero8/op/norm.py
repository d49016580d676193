# SPDX-License-Identifier: Apache-2.0
"""The norm of gradients on the CPU, in one read."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zero8.op.kernel import module
from zero8.op.structs import DTYPE_NUMBERS, NUMBERS
from zero8.op.threads import alive

DTYPES = (torch.float32, torch.bfloat16)


def sum_of_squares(grads: Sequence[Tensor], num_threads: int | None = None) -> float:
    """Return the sum of squares of gradients on the CPU, in double precision.

    The bits do not depend on the number of threads; the relative error is below 2^-40.
    """
    # torch reads gradients with gaps in memory, and of other dtypes.
    served: list[Tensor] = []
    others: list[Tensor] = []
    for grad in grads:
        (served if _is_served(grad) else others).append(grad)
    records = np.zeros(len(served), NUMBERS)
    records["data"] = [grad.data_ptr() for grad in served]
    records["numel"] = [grad.numel() for grad in served]
    records["dtype"] = [DTYPE_NUMBERS[grad.dtype] for grad in served]
    total: float = module().sum_of_squares(records, alive(num_threads))
    return total + math.fsum(float(grad.double().square().sum()) for grad in others)


def _is_served(grad: Tensor) -> bool:
    if grad.layout != torch.strided or grad.dtype not in DTYPES:
        return False
    # Whether its elements fill a range of memory, each once, in whatever order.
    return grad.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(grad)
