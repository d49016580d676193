# SPDX-License-Identifier: Apache-2.0
"""Huge pages under large tensors: a step streams through memory, and 4 KiB pages slow it down.

Linux, with transparent huge pages set to `madvise` or `always`; elsewhere nothing happens.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache

from torch import Tensor

HUGE_PAGE_BYTES = 2 * 2**20

# linux/mman.h
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25


def advise_huge(x: Tensor) -> Tensor:
    """Ask for huge pages under a CPU tensor that nothing has written to yet, and return it."""
    _advise(x, _MADV_HUGEPAGE)
    return x


def collapse(x: Tensor) -> bool:
    """Move a CPU tensor that is in use to huge pages; return whether Linux (6.1 or later) did it.

    Takes about 3 ms per MiB, once; addresses and contents stay.
    """
    return _advise(x, _MADV_COLLAPSE)


def _advise(x: Tensor, advice: int) -> bool:
    if x.device.type != "cpu" or not x.is_contiguous():
        return False
    # Whole huge pages only: the memory beside them belongs to other tensors.
    begin = -(-x.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (x.data_ptr() + x.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    madvise = _madvise()
    if madvise is None or begin >= end:
        return False
    return madvise(begin, end - begin, advice) == 0


@lru_cache(maxsize=1)
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
