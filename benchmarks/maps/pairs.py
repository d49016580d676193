# SPDX-License-Identifier: Apache-2.0
"""How often each pair of codes is used, and with what error of the update."""

import math

import torch
from torch import Tensor

NUM_CODES = 256
LARGE = 0.1
"""Relative errors above this are counted as large."""


class PairTally:
    """Sums over elements, by the codes of their moments: [code of m, code of v], float64.

    Errors are |u_q - u|; relative ones, over |u|, are of elements with u != 0.

    Attributes:
        count: elements.
        moving: elements with u != 0.
    """

    def __init__(self):
        """Start empty."""
        self.count, self.moving, self._absolute, self._relative = (
            torch.zeros(NUM_CODES, NUM_CODES, dtype=torch.float64) for _ in range(4)
        )
        self._squares = self._reference_squares = self._large = 0.0

    def add(self, m_codes: Tensor, v_codes: Tensor, update: Tensor, reference: Tensor) -> None:
        """Add elements: places of their codes, int64, and updates, float32, all of one shape."""
        pair = (m_codes * NUM_CODES + v_codes).flatten()
        error = (update.double() - reference.double()).abs().flatten()
        moving = reference.flatten() != 0
        relative = error[moving] / reference.flatten()[moving].abs()
        self.count += _sums(pair)
        self.moving += _sums(pair[moving])
        self._absolute += _sums(pair, error)
        self._relative += _sums(pair[moving], relative)
        self._squares += error.square().sum().item()
        self._reference_squares += reference.double().square().sum().item()
        self._large += (relative > LARGE).sum().item()

    def share(self) -> Tensor:
        """Return the share of the elements that each pair has, NaN where none has it."""
        return torch.where(self.count > 0, self.count / self.count.sum(), torch.nan)

    def absolute_error(self) -> Tensor:
        """Return the mean |u_q - u| of each pair, NaN where none has it."""
        return self._absolute / self.count

    def relative_error(self) -> Tensor:
        """Return the mean |u_q - u| / |u| of each pair, NaN where none has it."""
        return self._relative / self.moving

    def by_first_moment(self) -> dict[str, list[float | None]]:
        """Return usage and mean errors for each code of m, None where the code is not used."""
        count, moving = self.count.sum(1), self.moving.sum(1)
        return {
            "share": (count / count.sum()).tolist(),
            "absolute_error": _or_none(self._absolute.sum(1) / count),
            "relative_error": _or_none(self._relative.sum(1) / moving),
        }

    def result(self) -> dict:
        """Return the means over all elements, ready for JSON."""
        numel, moving = self.count.sum().item(), self.moving.sum().item()
        return {
            "elements": int(numel),
            "pairs_used": int((self.count > 0).sum()),
            "mean_absolute_error": self._absolute.sum().item() / numel,
            "mean_relative_error": self._relative.sum().item() / moving,
            "rms_update_error": math.sqrt(self._squares / self._reference_squares),
            "large_relative_share": self._large / moving,
        }


def _sums(pair: Tensor, weights: Tensor | None = None) -> Tensor:
    sums = torch.bincount(pair, weights, minlength=NUM_CODES**2)
    return sums.view(NUM_CODES, NUM_CODES)


def _or_none(means: Tensor) -> list[float | None]:
    return [None if math.isnan(mean) else mean for mean in means.tolist()]
