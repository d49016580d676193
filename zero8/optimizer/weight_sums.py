# SPDX-License-Identifier: Apache-2.0
"""The sums by which steps find corrections that belong to other weights: zero8/spec/corrections.py.

They are run-time memory, 8 bytes per block, and no part of a state: after a load, and for a
correction that other code has put into a state, there are none, and all corrections count.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class _Sums:
    correction: "weakref.ref[Tensor]"
    sums: Tensor


class WeightSums:
    """The sums of an optimizer's parameters."""

    def __init__(self) -> None:
        """Start without any."""
        self._of: dict[int, _Sums] = {}  # by the parameter's id

    def of(self, p: Tensor, correction: Tensor, num_blocks: int, device: torch.device) -> Tensor:
        """Return the sums that a parameter's last step has left, (num_blocks, 2) int32.

        They are 0 if it had another correction.
        """
        known = self._of.get(id(p))
        if (
            known is None
            or known.correction() is not correction
            or (len(known.sums), known.sums.device) != (num_blocks, device)
        ):
            sums = torch.zeros(num_blocks, 2, dtype=torch.int32, device=device)
            known = self._of[id(p)] = _Sums(weakref.ref(correction), sums)
        return known.sums

    def moved(self, p: Tensor, correction: Tensor) -> None:
        """Take the contents of a parameter's last correction for those of this one."""
        if (known := self._of.get(id(p))) is not None:
            known.correction = weakref.ref(correction)

    def forget(self) -> None:
        """Let all corrections count: steps find 0, also where records are kept."""
        for known in self._of.values():
            known.sums.zero_()
