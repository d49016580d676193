# SPDX-License-Identifier: Apache-2.0
"""The codes of `linear4`: those of the 4-bit optimizers paper, without its rank-1 scales."""

import torch
from torch import Tensor

from zero8.spec.levels import NearestEntry

_POSITIVE = (0.0055, 0.0325000025, 0.0775, 0.21249999, 0.4375, 0.6625, 0.8875)
"""The dynamic tree map of three decades but 0 and 1, as torch's `linspace` rounds it."""


def linear4_code(*, signed: bool) -> NearestEntry:
    """Return the nearest of 16 levels, as in Li et al. (arXiv:2309.01507) and torchao.

    First moments have the dynamic tree map of three decades, second moments k/16 for k from 1 to
    16: (C5) and (C6).  No level of v is 0, as a v of 0 under an m that is not would let the update
    grow to its bound.  So what is 0 stays so only in blocks of zeros: elsewhere it becomes the
    block's largest element / 16.  0 has code 0, unlike torchao's codes of m.

    Error: at most half the gap around n, times |scale|; the largest gap is 0.225 (m) or 0.0625 (v).
    A v below 1/16 of the scale becomes that.  With the least scale levels but 0 are normal numbers.
    """
    if signed:
        return NearestEntry(True, 4, _tree_map, 2.0**-118, first=7)
    return NearestEntry(False, 4, _sixteenths, 2.0**-122)


def _tree_map() -> Tensor:
    negative = (-x for x in reversed(_POSITIVE))
    return torch.tensor([*negative, 0.0, *_POSITIVE, 1.0], dtype=torch.float32, device="cpu")


def _sixteenths() -> Tensor:
    return torch.arange(1, 17, dtype=torch.float32, device="cpu") / 16
