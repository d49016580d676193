# SPDX-License-Identifier: Apache-2.0
"""Advice to Linux on pages of memory."""

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache


def advise(begin: int, num_bytes: int, advice: int) -> None:
    """Give advice, a constant MADV_* of `mmap`, on the pages at an address; none elsewhere."""
    begin, end = begin // mmap.PAGESIZE * mmap.PAGESIZE, begin + num_bytes
    if sys.platform == "linux" and begin < end:
        _madvise()(begin, end - begin, advice)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
