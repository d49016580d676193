# SPDX-License-Identifier: Apache-2.0
"""Trainings to the end with gradients that are averaged in few bits: validation losses."""

from collections.abc import Callable
from typing import Any

from benchmarks.fidelity.losses import loss_statistics
from benchmarks.fidelity.pool import Job
from benchmarks.fidelity.training import Recipe, TrainingRun
from benchmarks.low_bit.ranks import TASK, RankGradients
from benchmarks.low_bit.reduction import ROUNDINGS, average
from zero8.optimizer import Adam8bitBlockwise

STEPS = 240
BETA2 = 0.999
SEEDS = (1, 2, 3, 4)
EXACT = "float32"

Kind = tuple[str, str]
"""A format and a rounding."""
KINDS: tuple[Kind, ...] = (
    (EXACT, "-"),
    *(("INT8", rounding) for rounding in ("nearest", "independent", "dither")),
    *(("INT4", rounding) for rounding in ROUNDINGS),
)


def final_loss(recipe: Recipe, kind: Kind, on_step: Callable[[], None]) -> float:
    """Train with Adam8bitBlockwise on averages over ranks; return the validation loss."""
    run = TrainingRun(recipe)
    gradients = RankGradients(run)
    optimizer = Adam8bitBlockwise(
        run.model.named_parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    for step in range(recipe.steps):
        grads = gradients.next(step)
        is_exact = kind[0] == EXACT
        gradients.hand_over(grads.mean(0) if is_exact else average(grads, *kind, recipe.seed, step))
        run.update(optimizer, step)
        on_step()
    return recipe.task.validation_loss(run.model)


def _jobs_of(kind: Kind) -> list[Job]:
    recipes = [Recipe(STEPS, BETA2, seed=seed, task=TASK) for seed in SEEDS]
    return [Job(final_loss, (recipe, kind), STEPS) for recipe in recipes]


def loss_jobs() -> list[Job]:
    """Return the runs of all kinds and seeds."""
    return [job for kind in KINDS for job in _jobs_of(kind)]


def loss_rows(results: dict[Job, Any]) -> list[dict]:
    """Return a row per kind; differences are to runs of the same seed with exact averages."""
    exact, *_ = losses = [[results[job] for job in _jobs_of(kind)] for kind in KINDS]
    return [
        {
            "format": name,
            "rounding": rounding,
            "seeds": list(SEEDS),
            "steps": STEPS,
            **loss_statistics(values, exact),
        }
        for (name, rounding), values in zip(KINDS, losses, strict=True)
    ]
