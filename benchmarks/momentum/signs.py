# SPDX-License-Identifier: Apache-2.0
"""Lion in 8 bits: how many of its updates, which are signs, are not those of float32 states."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.fidelity.schemes import FP32_CONTROL, Shadow
from benchmarks.fidelity.training import Layout, Recipe
from benchmarks.momentum.averages import STATES, first_moments
from benchmarks.momentum.recorded import lion, replay

BETAS = ((0.9, 0.99), (0.95, 0.98))


class WrongSigns:
    """Counts signs that differ from those of the directions c in float32, where c is not 0."""

    def __init__(self) -> None:
        """Start empty."""
        self._wrong = self._all = 0
        self._wrong_weight = self._weight = 0.0

    def compare(self, sign: Tensor, direction: Tensor) -> None:
        """Add the signs of a step; both are flat float32."""
        wrong = (sign != direction.sign()) & (direction != 0)
        weight = direction.abs()
        self._wrong += wrong.sum().item()
        self._all += direction.count_nonzero().item()
        self._wrong_weight += weight[wrong].sum(dtype=torch.float64).item()
        self._weight += weight.sum(dtype=torch.float64).item()

    def shares(self) -> dict[str, float]:
        """Return the share of wrong signs, and their share where each counts |c|."""
        return {
            "wrong_share": self._wrong / self._all,
            "wrong_share_by_size": self._wrong_weight / self._weight,
        }


class Signs:
    """Lion with one pair of betas."""

    def __init__(self, layout: Layout, betas: tuple[float, float]):
        """Make the optimizers."""
        self._betas = betas
        self._reference = Shadow(lion(FP32_CONTROL), layout, betas)
        self._moment = torch.zeros(layout.numel)
        self._rivals = {states: Shadow(lion(states), layout, betas) for states in STATES}
        self._counts = {states: WrongSigns() for states in STATES}

    def take(self, grad: Tensor, counts: bool) -> None:
        """See `Comparison`."""
        beta1, _ = self._betas
        direction = beta1 * self._moment + (1 - beta1) * grad
        self._reference.update(grad)
        self._moment = first_moments(self._reference)
        for states, rival in self._rivals.items():
            sign = rival.update(grad)
            if counts:
                self._counts[states].compare(sign, direction)

    def rows(self) -> list[dict]:
        """Return a row per codec."""
        return [
            {"betas": list(self._betas), "states": states, **count.shares()}
            for states, count in self._counts.items()
        ]


def signs(recipe: Recipe, on_step: Callable[[], None]) -> list[dict]:
    """Return the shares of wrong signs on a run's gradients, a row per pair of betas and codec."""
    found = replay(recipe, lambda layout: [Signs(layout, betas) for betas in BETAS], on_step)
    return [row for comparison in found for row in comparison.rows()]
