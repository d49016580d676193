# SPDX-License-Identifier: Apache-2.0
"""Huge pages under large states: a step streams through memory, and 4 KiB pages slow it down.

Linux, with transparent huge pages set to `madvise` or `always`; elsewhere nothing happens.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache

from torch import Tensor

HUGE_PAGE_BYTES = 2 * 2**20

_MADV_HUGEPAGE = 14  # linux/mman.h


def advise_huge(x: Tensor) -> Tensor:
    """Ask for huge pages under a CPU tensor that nothing has written to yet, and return it."""
    if x.device.type != "cpu" or not x.is_contiguous():
        return x
    # Whole huge pages only: the memory beside them belongs to other tensors.
    begin = -(-x.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (x.data_ptr() + x.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    madvise = _madvise()
    if madvise is not None and begin < end:
        madvise(begin, end - begin, _MADV_HUGEPAGE)
    return x


@lru_cache(maxsize=1)
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
