# SPDX-License-Identifier: Apache-2.0
"""Trainings to the end with Lion and with SGD: validation losses in float32 and in 8 bits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from benchmarks.fidelity.images import ImageTask
from benchmarks.fidelity.losses import loss_statistics, train
from benchmarks.fidelity.pool import Job
from benchmarks.fidelity.schemes import FP32_CONTROL, zero8_states
from benchmarks.fidelity.text import TextTask
from benchmarks.fidelity.training import Recipe, Task, TrainingRun
from zero8.optimizer import Lion8bitBlockwise, SGD8bitBlockwise

SEEDS = (1, 2, 3, 4, 5)
STATES = (FP32_CONTROL, "log", "dynamic")
LION_BETAS = (0.9, 0.99)
MOMENTUM = 0.9


@dataclass(frozen=True)
class Setting:
    """A task, an optimizer, and what they are trained with."""

    task_name: str
    optimizer: str
    task: Task
    steps: int
    peak_lr: float
    weight_decay: float

    def recipe(self, seed: int) -> Recipe:
        """Return the run of a seed."""
        beta1, beta2 = LION_BETAS
        return Recipe(self.steps, beta2, beta1, seed, self.task, self.peak_lr, self.weight_decay)


SETTINGS = (
    Setting("text", "Lion", TextTask(), steps=240, peak_lr=3e-4, weight_decay=0.1),
    Setting("text", "SGD", TextTask(), steps=240, peak_lr=0.1, weight_decay=0.0),
    Setting("convolutions", "Lion", ImageTask(), steps=600, peak_lr=1e-3, weight_decay=0.1),
    Setting("convolutions", "SGD", ImageTask(), steps=600, peak_lr=0.1, weight_decay=0.0),
)


def make_optimizer(name: str, states: str, model: nn.Module, weight_decay: float) -> Optimizer:
    """Return Lion, or SGD with Nesterov's momentum, in a codec or in float32."""
    named, kept = model.named_parameters(), zero8_states(states)
    if name == "Lion":
        return Lion8bitBlockwise(named, betas=LION_BETAS, weight_decay=weight_decay, **kept)
    return SGD8bitBlockwise(
        named, momentum=MOMENTUM, nesterov=True, weight_decay=weight_decay, **kept
    )


def final_loss(recipe: Recipe, optimizer: str, states: str, on_step: Callable[[], None]) -> float:
    """Train with one optimizer and return the validation loss."""
    run = TrainingRun(recipe)
    return train(run, make_optimizer(optimizer, states, run.model, recipe.weight_decay), on_step)


def jobs_of(setting: Setting, states: str) -> list[Job]:
    """Return the runs of all seeds."""
    recipes = [setting.recipe(seed) for seed in SEEDS]
    return [
        Job(final_loss, (recipe, setting.optimizer, states), setting.steps) for recipe in recipes
    ]


def loss_jobs() -> list[Job]:
    """Return all runs."""
    return [job for setting in SETTINGS for states in STATES for job in jobs_of(setting, states)]


def loss_rows(results: dict[Job, Any]) -> list[dict]:
    """Return a row per setting and states."""
    return [
        row
        for setting in SETTINGS
        for row in rows_of(
            setting,
            {states: [results[job] for job in jobs_of(setting, states)] for states in STATES},
        )
    ]


def rows_of(setting: Setting, losses: dict[str, list[float]]) -> list[dict]:
    """Return a row per states from the final losses, in the order of the seeds."""
    fp32 = losses[FP32_CONTROL]
    return [
        {
            "task": setting.task_name,
            "optimizer": setting.optimizer,
            "states": states,
            "steps": setting.steps,
            "peak_lr": setting.peak_lr,
            "weight_decay": setting.weight_decay,
            "seeds": list(SEEDS),
            "val_loss_lowest": min(found),
            "val_loss_highest": max(found),
            "mean_within_fp32s_range": min(fp32) <= sum(found) / len(found) <= max(fp32),
            **loss_statistics(found, fp32),
        }
        for states, found in losses.items()
    ]
