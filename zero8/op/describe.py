# SPDX-License-Identifier: Apache-2.0
"""Where tensors are and of what kind, of many tensors at once.

A step asks this of every parameter, gradient and state, and the step before has driven the objects
out of the caches: one by one, that takes longer than the step of a small parameter.
"""

import numpy as np
from torch import Tensor

from zero8.op import kernel
from zero8.op.structs import TENSOR, WITHOUT_MEMORY


def described(objects: list[Tensor | float]) -> np.ndarray:
    """Return address, number of elements, kind and contiguity of tensors.

    Numbers may be among them, as they are in states: asking which is what would take longer.

    Returns:
        (len(objects),) `TENSOR`.  `kind` is equal for equal dtype and device, its upper 32 bits for
        equal device; it is `WITHOUT_MEMORY` for tensors that have none of their own, such as sparse
        ones.  A number is contiguous, and otherwise 0.
    """
    records = np.empty(len(objects), TENSOR)
    api = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if api is None or not kernel.module().describe(api, Tensor, objects, records):
        for number, one in enumerate(objects):
            records[number] = _described(one)
    return records


def _described(one: Tensor | float) -> tuple[int, int, int, bool]:
    """Return one record, as torch before 2.10 can tell it."""
    if not isinstance(one, Tensor):
        return 0, 0, 0, True
    try:
        data = one.data_ptr()
    except RuntimeError:
        return 0, 0, WITHOUT_MEMORY, False
    kind = (hash(one.device) & 0x7FFFFFFF) << 32 | hash(one.dtype) & 0xFFFFFFFF
    return data, one.numel(), kind, one.is_contiguous()
