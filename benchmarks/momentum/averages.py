# SPDX-License-Identifier: Apache-2.0
"""A moving average of gradients that is kept in 8 bits: how far it is from one in float32."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.fidelity.metrics import Errors
from benchmarks.fidelity.schemes import FP32_CONTROL, Shadow, zero8_scheme
from benchmarks.fidelity.training import Layout, Recipe
from benchmarks.momentum.recorded import replay, sgd

BETAS = (0.9, 0.99, 0.999)
STATES = ("log", "dynamic")
SETTLING = "log, Adam's first moment"

# Panter and Dite, "Quantization distortion in pulse-count modulation with nonuniform spacing of
# levels" (1951): the least RMS error of 256 levels for a Gaussian, over its standard deviation.
LEAST_ERROR = math.sqrt(math.pi * math.sqrt(3) / 2) / 256


def bound(beta: float) -> float:
    """Return what `LEAST_ERROR` at every step adds up to in a run without end.

    The errors of all steps are taken as independent, which they are to no code with a memory.  A
    step rounds its moment after the update, so that an error is decayed once before it is seen:
    LEAST_ERROR * sqrt(beta^2 + beta^4 + ...).
    """
    return LEAST_ERROR * beta / math.sqrt(1 - beta**2)


class RunBound:
    """The same over the steps of a run.

    e(t) = beta^2 (e(t-1) + LEAST_ERROR^2 s(t-1)),  s(t) the sum of u^2 at step t
    """

    def __init__(self, beta: float):
        """Start with moments of zero."""
        self._decay = beta**2
        self._squares = self._last = self._counted_squares = self._counted = 0.0

    def take(self, update: Tensor, counts: bool) -> None:
        """Add the update of a step in float32."""
        self._squares = self._decay * (self._squares + LEAST_ERROR**2 * self._last)
        self._last = torch.dot(update, update).item()
        if counts:
            self._counted_squares += self._squares
            self._counted += self._last

    @property
    def rms(self) -> float:
        """The error of the steps that count over RMS(u)."""
        return math.sqrt(self._counted_squares / self._counted)


class SettlingAverage:
    """The average as it would be with the code of Adam's first moment: Adam's first moment."""

    def __init__(self, layout: Layout, beta: float):
        """Make an Adam whose beta1 is `beta`."""
        self._shadow = Shadow(zero8_scheme("log"), layout, (beta, 0.999))
        self._beta, self._stored = beta, torch.zeros(layout.numel)

    def update(self, grad: Tensor) -> Tensor:
        """Take a step and return the average over 1 - beta, before it is rounded; flat float32."""
        average = self._beta / (1 - self._beta) * self._stored + grad
        self._shadow.update(grad)
        self._stored = first_moments(self._shadow)
        return average


def first_moments(shadow: Shadow) -> Tensor:
    """Return the stored first moment of all parameters, flat float32."""
    (group,) = shadow.optimizer.param_groups
    moments = [(shadow.optimizer.moments(p)[0], p.numel()) for p in group["params"]]
    return torch.cat([moment.read(0, numel) for moment, numel in moments])


class Averages:
    """The averages of one beta."""

    def __init__(self, layout: Layout, beta: float):
        """Make the optimizers."""
        self._beta = beta
        betas = (beta, beta)
        self._reference = Shadow(sgd(FP32_CONTROL), layout, betas)
        self._rivals = {states: Shadow(sgd(states), layout, betas) for states in STATES}
        self._rivals[SETTLING] = SettlingAverage(layout, beta)
        self._errors = {states: Errors(layout.numel) for states in self._rivals}
        self._bound = RunBound(beta)

    def take(self, grad: Tensor, counts: bool) -> None:
        """See `Comparison`."""
        expected = self._reference.update(grad)
        self._bound.take(expected, counts)
        for states, rival in self._rivals.items():
            update = rival.update(grad)
            if counts:
                self._errors[states].compare(update, expected)

    def rows(self) -> list[dict]:
        """Return a row per code."""
        return [
            {
                "beta": self._beta,
                "states": states,
                "rms_error": errors.rms,
                "drift": errors.drift,
                "error_over_dynamic": errors.rms / self._errors["dynamic"].rms,
                "bound_of_run": self._bound.rms,
                "bound": bound(self._beta),
            }
            for states, errors in self._errors.items()
        ]


def averages(recipe: Recipe, on_step: Callable[[], None]) -> list[dict]:
    """Return the errors of averages of a run's gradients, a row per beta and code."""
    found = replay(recipe, lambda layout: [Averages(layout, beta) for beta in BETAS], on_step)
    return [row for comparison in found for row in comparison.rows()]
