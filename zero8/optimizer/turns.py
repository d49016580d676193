# SPDX-License-Identifier: Apache-2.0
"""Which parameters take their steps after each other, because they share memory.

Threads share out the elements of one kernel call, so two of them may be at the same weight at once.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor


def extents_of(tensors: Sequence[Tensor]) -> np.ndarray:
    """Return the number of bytes from the first element of each tensor to its last."""
    return np.array([_extent(tensor) for tensor in tensors], np.uint64)


def turns_of(addresses: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """Return the turn of each tensor, from 0: one after those of all earlier ones that overlap it.

    Addresses and extents (`extents_of`) are (tensors,) uint64; the turns are (tensors,) int64.
    """
    turns = np.zeros(len(addresses), np.int64)
    begins = np.where(extents > 0, addresses, np.uint64(0))
    ends = begins + extents
    order = np.argsort(begins, kind="stable")
    if (begins[order][1:] >= np.maximum.accumulate(ends[order])[:-1]).all():
        return turns
    for place in range(1, len(turns)):
        overlaps = (begins[:place] < ends[place]) & (ends[:place] > begins[place])
        turns[place] = (turns[:place][overlaps] + 1).max(initial=0)
    return turns


def _extent(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    ends = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + sum(ends)) * tensor.element_size()
