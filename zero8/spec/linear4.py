# SPDX-License-Identifier: Apache-2.0
"""The codes of `linear4`: those of the 4-bit optimizers paper, without its rank-1 scales."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zero8.spec.dynamic import tree_map
from zero8.spec.levels import NearestEntry


@dataclass(frozen=True)
class Linear4Code(NearestEntry):
    """The nearest of 16 levels, as in Li et al. (arXiv:2309.01507) and torchao's `AdamW4bit`.

    First moments have the dynamic tree map of three decades, second moments k/16 for k from 1 to
    16: (C5) and (C6).  No level of v is 0, as a v of 0 under an m that is not would let the update
    grow to its bound.  So what is 0 stays so only in blocks of zeros: elsewhere it becomes the
    block's largest element / 16.

    Error: at most half the gap around n, times |scale|; the largest gap is 0.225 (m) or 0.0625 (v).
    A v below 1/16 of the scale becomes that.
    """

    bits = 4

    @property
    def first(self) -> int:
        """The place of the entry that has code 0: of m that is 0 itself, as torchao's is not."""
        return 7 if self.signed else 0

    @property
    def min_scale(self) -> float:
        """Smaller scales are raised to it: levels but 0 decode to normal numbers."""
        return 2.0**-118 if self.signed else 2.0**-122

    @cached_property
    def entries(self) -> Tensor:
        """(16,) float32, ascending, in the order of torchao's codes."""
        if self.signed:
            return tree_map(3, 0, signed=True)
        return torch.arange(1, 17, dtype=torch.float32, device="cpu") / 16
