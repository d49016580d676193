# SPDX-License-Identifier: Apache-2.0
"""Closed loops: training runs of several seeds to the end, compared by their final losses."""

import statistics
from collections.abc import Callable

import torch

from benchmarks.fidelity.pool import Job
from benchmarks.fidelity.schemes import zero8_states
from benchmarks.fidelity.training import Recipe, TrainingRun, adamw
from zero8.optimizer import Adam8bitBlockwise

FP32 = "fp32"


def train(run: TrainingRun, optimizer, on_step: Callable[[], None]) -> float:
    """Train to the end with an optimizer of the run's model; return the validation loss."""
    recipe = run.recipe
    for step in range(recipe.steps):
        run.model.zero_grad()
        run.backward(step)
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), recipe.max_norm)
        run.update(optimizer, step)
        on_step()
    return recipe.task.validation_loss(run.model)


def final_loss(recipe: Recipe, scheme: str, on_step: Callable[[], None]) -> float:
    """Train with one optimizer and return the validation loss.

    Args:
        recipe: the run.
        scheme: `fp32` (torch's AdamW), a codec of zero8, or `fp32_zero8`, whose difference to
            `fp32` is what rounding alone does to the loss of a run.
        on_step: called after every step.
    """
    run = TrainingRun(recipe)
    if scheme == FP32:
        return train(run, adamw(run.model, recipe), on_step)
    optimizer = Adam8bitBlockwise(
        run.model.named_parameters(),
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        **zero8_states(scheme),
    )
    return train(run, optimizer, on_step)


def loss_job(recipe: Recipe, scheme: str) -> Job:
    """Return the job of a run with one optimizer."""
    return Job(final_loss, (recipe, scheme), recipe.steps)


def loss_statistics(losses: list[float], fp32_losses: list[float]) -> dict:
    """Return the statistics over seeds, and those of the differences between runs of one seed."""
    differences = [loss - fp32 for loss, fp32 in zip(losses, fp32_losses, strict=True)]
    return {
        "val_losses": losses,
        "val_loss_mean": statistics.mean(losses),
        "val_loss_std": statistics.stdev(losses),
        "difference_mean": statistics.mean(differences),
        "difference_std": statistics.stdev(differences),
    }
