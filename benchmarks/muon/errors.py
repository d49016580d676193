# SPDX-License-Identifier: Apache-2.0
"""Updates of Muon on the gradients of one run: how far rounded momentum takes them from float32."""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.fidelity.metrics import Errors
from benchmarks.fidelity.schemes import FP32_CONTROL, Shadow
from benchmarks.fidelity.training import Layout, Recipe
from benchmarks.momentum.recorded import replay
from benchmarks.muon.orthogonal import (
    angle_deg,
    is_hidden,
    median_singular_value,
    orthogonalized,
)
from benchmarks.muon.states import STATES, nesterov

MOMENTA = (0.95, 0.99)
COMPARED_EVERY = 5
YARDSTICK = f"{FP32_CONTROL}, Newton-Schulz in bfloat16"


class MatrixErrors:
    """Errors of one matrix in one form."""

    def __init__(self, numel: int):
        """Start empty."""
        self._update, self._orthogonalized = Errors(numel), Errors(numel)
        self.angles_deg: list[float] = []

    def compare(self, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
        """Add a step; both pairs are the update and the orthogonalized update."""
        for errors, one, other in zip(
            (self._update, self._orthogonalized), found, expected, strict=True
        ):
            errors.compare(one.flatten(), other.flatten())
        self.angles_deg.append(angle_deg(found[1], expected[1]))

    def row(self) -> dict:
        """Return the errors over all steps."""
        return {
            "update_error": self._update.rms,
            "orthogonalized_error": self._orthogonalized.rms,
            "angle_deg_mean": statistics.mean(self.angles_deg),
            "angle_deg_worst": max(self.angles_deg),
        }


class Updates:
    """The updates of the hidden matrices, at one momentum, with all `STATES`."""

    def __init__(self, layout: Layout, momentum: float):
        """Make the optimizers."""
        self._momentum, self._all = momentum, layout
        self._is_hidden = [is_hidden(*of) for of in zip(layout.names, layout.shapes, strict=True)]
        names, shapes = self._hidden(layout.names), self._hidden(layout.shapes)
        self._layout = Layout(tuple(names), tuple(shapes))
        betas = (momentum, momentum)
        self._shadows = {s: Shadow(nesterov(s), self._layout, betas) for s in STATES}
        sizes = [rows * columns for rows, columns in shapes]
        self._errors = {
            states: [MatrixErrors(size) for size in sizes] for states in (*STATES, YARDSTICK)
        }
        self._medians: list[list[float]] = [[] for _ in sizes]
        self._counted = 0

    def take(self, grad: Tensor, counts: bool) -> None:
        """See `Comparison`; of the steps that count, one in `COMPARED_EVERY` is compared."""
        flat = torch.cat([view.flatten() for view in self._hidden(self._all.views(grad))])
        updates = {states: shadow.update(flat) for states, shadow in self._shadows.items()}
        if counts:
            if self._counted % COMPARED_EVERY == 0:
                self._compare(updates)
            self._counted += 1

    def _hidden(self, of_all):
        return [one for one, hidden in zip(of_all, self._is_hidden, strict=True) if hidden]

    def _compare(self, updates: dict[str, Tensor]) -> None:
        matrices = {states: self._layout.views(flat) for states, flat in updates.items()}
        for number, exact in enumerate(matrices[FP32_CONTROL]):
            expected = exact, orthogonalized(exact)
            self._medians[number].append(median_singular_value(exact))
            for states in STATES:
                update = matrices[states][number]
                found = update, orthogonalized(update)
                self._errors[states][number].compare(found, expected)
            rounded = exact, orthogonalized(exact, torch.bfloat16)
            self._errors[YARDSTICK][number].compare(rounded, expected)

    def rows(self) -> list[dict]:
        """Return a row per states, with a row per matrix in each."""
        return [self._row(states, errors) for states, errors in self._errors.items()]

    def _row(self, states: str, errors: list[MatrixErrors]) -> dict:
        matrices = [one.row() for one in errors]
        angles_deg = [angle for one in errors for angle in one.angles_deg]
        compared = len(errors[0].angles_deg)
        row = {"momentum": self._momentum, "states": states, "compared_steps": compared}
        for key in ("update_error", "orthogonalized_error"):
            found = [matrix[key] for matrix in matrices]
            row |= {f"{key}_mean": statistics.mean(found), f"{key}_worst": max(found)}
        row |= {"angle_deg_mean": statistics.mean(angles_deg), "angle_deg_worst": max(angles_deg)}
        medians = [statistics.mean(found) for found in self._medians]
        of_matrices = zip(self._layout.names, medians, matrices, strict=True)
        row["matrices"] = [
            {"name": name, "fp32_median_singular_value": median, **matrix}
            for name, median, matrix in of_matrices
        ]
        return row


def update_errors(recipe: Recipe, on_step: Callable[[], None]) -> list[dict]:
    """Return the errors of updates on a run's gradients, a row per momentum and states."""
    found = replay(recipe, lambda layout: [Updates(layout, mu) for mu in MOMENTA], on_step)
    return [row for comparison in found for row in comparison.rows()]
