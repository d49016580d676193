# SPDX-License-Identifier: Apache-2.0
"""Adam with a short and with a long first moment, which `log` rounds by (C2') and by (C2")."""

from collections.abc import Callable

from benchmarks.fidelity.replay import replay
from benchmarks.fidelity.schemes import zero8_scheme
from benchmarks.fidelity.training import Recipe
from benchmarks.momentum.averages import STATES

BETA1S = (0.9, 0.99)
KEYS = "rms_update_error", "drift"


def adam(recipe: Recipe, on_step: Callable[[], None]) -> list[dict]:
    """Return the errors of Adam's updates on the gradients of a run with its betas."""
    rows, _ = replay(recipe, [zero8_scheme(codec) for codec in STATES], on_step)
    return [
        {"betas": list(recipe.betas), "states": row["scheme"], **{key: row[key] for key in KEYS}}
        for row in rows
    ]
