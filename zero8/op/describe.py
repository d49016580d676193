# SPDX-License-Identifier: Apache-2.0
"""Where tensors are and of what kind, of many tensors at once.

A step asks this of every parameter, gradient and state, and the step before has driven the objects
out of the caches: one by one, that takes longer than the step of a small parameter.
"""

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from zero8.op import kernel

# Of csrc/binding.cpp, which compares the sizes.
TENSOR = np.dtype([("data", "u8"), ("numel", "i8"), ("kind", "i8"), ("contiguous", "i8")])
WITHOUT_MEMORY = -1

CACHE_LINE = 64
# Bytes of an object: of Python's tensor or dict from 16 before its address on, where the garbage
# collector keeps its links, and of the C++ object behind a tensor.
_PYTHON_BYTES, _TENSOR_BYTES = 96, 208


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


def object_lines(objects: Iterable[Tensor | dict]) -> np.ndarray:
    """Return the cache lines of tensors and dicts themselves, without what they hold.

    Returns:
        (lines,) uint64, their addresses over 64, for `prefetch`.
    """
    spans = []
    for one in objects:
        spans.append((id(one) - 16, _PYTHON_BYTES))
        if isinstance(one, Tensor):
            spans.append((one._cdata, _TENSOR_BYTES))
    ends = [(start // CACHE_LINE, (start + size - 1) // CACHE_LINE + 1) for start, size in spans]
    return np.array(sorted({line for span in ends for line in range(*span)}), np.uint64)


def prefetch(lines: np.ndarray) -> None:
    """Ask the processor for cache lines: harmless, whatever has become of what was there."""
    kernel.module().prefetch(lines)
