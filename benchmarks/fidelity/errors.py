# SPDX-License-Identifier: Apache-2.0
"""How far updates are from those of fp32 states on the same gradients."""

import math

import torch
from torch import Tensor


class Errors:
    """Root mean squares of the differences of updates u_q to u, and of their sums, flat float32."""

    def __init__(self, numel: int):
        """Start empty, for this number of parameters."""
        self._difference_squares = self._reference_squares = 0.0
        self._difference_sum, self._reference_sum = torch.zeros(numel), torch.zeros(numel)

    def compare(self, update: Tensor, reference: Tensor) -> None:
        """Add a step."""
        difference = update - reference
        self._difference_squares += torch.dot(difference, difference).item()
        self._reference_squares += torch.dot(reference, reference).item()
        self._difference_sum += difference
        self._reference_sum += reference

    @property
    def rms(self) -> float:
        """RMS(u_q - u) / RMS(u)."""
        return math.sqrt(self._difference_squares / self._reference_squares)

    @property
    def drift(self) -> float:
        """The same of the sums of updates."""
        return (self._difference_sum.norm() / self._reference_sum.norm()).item()


def sqrt_bias(stored: Tensor, reference: Tensor) -> float:
    """Return the geometric mean of sqrt(stored / reference), over elements where both are not 0."""
    both = (stored > 0) & (reference > 0)
    return (0.5 * (stored[both].double() / reference[both].double()).log()).mean().exp().item()
