# SPDX-License-Identifier: Apache-2.0
"""The norm of gradients on the CPU, in one read."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zero8.op.kernel import module
from zero8.op.structs import DTYPE_NUMBERS, NUMBERS
from zero8.op.threads import alive, step_threads

DTYPES = (torch.float32, torch.bfloat16)


def is_served(grad: Tensor) -> bool:
    """Return whether `sum_of_squares` reads such a gradient: one without gaps, on the CPU."""
    return (
        type(grad) is Tensor
        and grad.device.type == "cpu"
        and grad.layout == torch.strided
        and grad.dtype in DTYPES
        and (grad.is_contiguous() or _is_dense(grad))
    )


def _is_dense(t: Tensor) -> bool:
    """Return whether the elements fill a range of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def sum_of_squares(grads: Sequence[Tensor], num_threads: int | None = None) -> float:
    """Return the sum of squares of gradients that are served, in double precision.

    The bits do not depend on the number of threads.  The relative error is below 2^-40.

    Args:
        grads: any shapes.
        num_threads: threads to use; `step_threads()` by default.
    """
    records = np.zeros(len(grads), NUMBERS)
    records["data"] = [grad.data_ptr() for grad in grads]
    records["numel"] = [grad.numel() for grad in grads]
    records["dtype"] = [DTYPE_NUMBERS[grad.dtype] for grad in grads]
    threads = step_threads() if num_threads is None else num_threads
    total: float = module().sum_of_squares(records, alive(threads))
    return total
