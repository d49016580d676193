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


def sqrt_error(stored: Tensor, reference: Tensor) -> float:
    """Return the RMS of sqrt(stored / reference) - 1, over elements whose reference is not 0."""
    nonzero = reference > 0
    ratio = (stored[nonzero].double() / reference[nonzero].double()).sqrt()
    return (ratio - 1).square().mean().sqrt().item()


class Stalls:
    """Which codes of v have not changed since the first ones.

    Attributes:
        last: the last values of v, flat.
    """

    LEAST = 0.01

    def __init__(self):
        """Start empty."""
        self._first, self.last = torch.empty(0), torch.empty(0)

    def add(self, values: Tensor, codes: Tensor) -> None:
        """Add the v of a step, and its codes."""
        if not self._first.numel():
            self._first, self._codes = values, codes
            self._same = torch.ones_like(codes, dtype=torch.bool)
        self._same &= codes == self._codes
        self.last = values

    def share(self, exact: "Stalls") -> float:
        """Return the share of elements that stood still, of those whose exact v moved by 1 %."""
        moved = (exact.last - exact._first).abs() > self.LEAST * exact._first
        return (self._same & moved).sum().item() / max(1, moved.sum().item())
