# SPDX-License-Identifier: Apache-2.0
"""How far updates and weights are from those of fp32 Adam on the same gradients."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from zero8.algorithms.adam import next_history

# Bins of |difference|: 64 per octave, so a percentile is exact to 1.6 %.
_BIN_SHIFT = 17
_NUM_BINS = 1 << (31 - _BIN_SHIFT)


def update_bounds(betas: tuple[float, float]) -> Iterator[float]:
    """Yield, for step 1, 2, ..., the largest |u| that exact moments can have.

    |u| <= sqrt(K_t (1-beta2^t)) / (1-beta1^t) with K_t of equation (S1) in `zero8.algorithms.adam`.
    """
    beta1, beta2 = betas
    history, step = 0.0, 0
    while True:
        history, step = next_history(history, beta1, beta2), step + 1
        yield math.sqrt(history * (1 - beta2**step)) / (1 - beta1**step)


class Errors:
    """Root mean squares of the differences of updates u_q to u, and of their sums, flat float32."""

    def __init__(self, numel: int):
        """Start empty, for this number of parameters."""
        self._difference_squares = self.reference_squares = 0.0
        self._difference_sum, self._reference_sum = torch.zeros(numel), torch.zeros(numel)

    def compare(self, update: Tensor, reference: Tensor) -> Tensor:
        """Add a step; return the difference."""
        difference = update - reference
        self._difference_squares += torch.dot(difference, difference).item()
        self.reference_squares += torch.dot(reference, reference).item()
        self._difference_sum += difference
        self._reference_sum += reference
        return difference

    @property
    def rms(self) -> float:
        """RMS(u_q - u) / RMS(u)."""
        return math.sqrt(self._difference_squares / self.reference_squares)

    @property
    def drift(self) -> float:
        """The same of the sums of updates."""
        return (self._difference_sum.norm() / self._reference_sum.norm()).item()


class Tally:
    """Compares the updates u_q of one scheme with the updates u of fp32 Adam.

    u = mhat / (sqrt(vhat) + eps); both are flat float32 tensors of one element per parameter.
    """

    def __init__(self, numel: int, untrained: Tensor):
        """Start empty.

        Args:
            numel: number of parameters.
            untrained: int64 indices of the parameters whose gradient is always zero.
        """
        self._untrained = untrained
        self._moved = torch.zeros(untrained.numel(), dtype=torch.bool)
        self._max_update = self._max_bound = self._max_excess = 0.0
        self._errors = Errors(numel)
        self._histogram = torch.zeros(_NUM_BINS, dtype=torch.int64)
        self._log_ratio = self._nonzero = self._lost = self._positive = 0.0

    def watch(self, update: Tensor, bound: float) -> None:
        """Take note of the extremes of a step; to be called at every step."""
        largest = update.abs().max().item()
        self._max_update = max(self._max_update, largest)
        self._max_bound = max(self._max_bound, bound)
        self._max_excess = max(self._max_excess, largest / bound)
        self._moved |= update[self._untrained] != 0

    def compare(self, update: Tensor, reference: Tensor) -> None:
        """Add a step to the error statistics."""
        bins = self._errors.compare(update, reference).abs_().view(torch.int32) >> _BIN_SHIFT
        self._histogram += torch.bincount(bins, minlength=_NUM_BINS)

    def compare_second_moments(self, stored: Tensor, reference: Tensor) -> None:
        """Add a sample of stored second moments to the statistics of sqrt(v)."""
        positive = reference > 0
        both = positive & (stored > 0)
        ratio = stored[both].double() / reference[both].double()
        self._log_ratio += 0.5 * ratio.log().sum().item()
        self._nonzero += both.sum().item()
        self._positive += positive.sum().item()
        self._lost += (positive & (stored == 0)).sum().item()

    def _percentile(self, share: float) -> float:
        """Return the upper edge of the bin that holds this percentile of |difference|."""
        counts = self._histogram.cumsum(0)
        number = torch.searchsorted(counts, math.ceil(share * counts[-1].item()))
        return ((number.to(torch.int32) + 1) << _BIN_SHIFT).view(torch.float32).item()

    def result(self) -> dict:
        """Return the metrics of everything seen so far, ready for JSON."""
        samples = self._histogram.sum().item()
        rms = math.sqrt(self._errors.reference_squares / samples)
        return {
            "rms_update_error": self._errors.rms,
            "p999_update_error": self._percentile(0.999) / rms,
            "max_abs_u": self._max_update,
            "max_abs_u_bound": self._max_bound,
            "max_u_over_bound": self._max_excess,
            "drift": self._errors.drift,
            "zero_grad_moved": int(self._moved.sum()),
            "zero_grad_count": self._untrained.numel(),
            "sqrt_v_bias": math.exp(self._log_ratio / self._nonzero),
            "v_zero_share": self._lost / self._positive,
        }


def bf16_ulp(x: Tensor) -> Tensor:
    """Return the distance from |x| to the next larger bfloat16, 2^-133 at least; float64."""
    _, exponent = torch.frexp(x.double().abs().clamp(min=2.0**-126))
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 8)


def weight_distance(weights: Tensor, reference: Tensor) -> dict:
    """Return how far weights are from a reference in bfloat16 ulps of the larger of the two.

    (Of the smaller, weights that cross zero would decide everything.)
    """
    ulp = bf16_ulp(torch.maximum(weights.abs(), reference.abs()))
    distance = (weights.double() - reference.double()).abs() / ulp
    return {
        "median_ulps": distance.median().item(),
        "rms_ulps": distance.square().mean().sqrt().item(),
        "p999_ulps": distance.kthvalue(math.ceil(0.999 * distance.numel())).values.item(),
        "max_ulps": distance.max().item(),
    }
