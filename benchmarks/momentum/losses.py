# SPDX-License-Identifier: Apache-2.0
"""Trainings to the end with Lion, SGD and AdEMAMix: validation losses in float32 and in 8 bits."""

import math
from collections.abc import Callable, Sequence
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
from zero8.optimizer import AdEMAMix8bitBlockwise, Lion8bitBlockwise, SGD8bitBlockwise

STATES = (FP32_CONTROL, "log", "dynamic")
LION_BETAS = (0.9, 0.99)
MOMENTUM = 0.9
MIX_BETAS = (0.9, 0.999, 0.9999)


@dataclass(frozen=True)
class Setting:
    """A task, an optimizer, and what they are trained with."""

    task_name: str
    optimizer: str
    task: Task
    steps: int
    peak_lr: float
    weight_decay: float

    @property
    def name(self) -> str:
        """The task and the optimizer."""
        return f"{self.task_name}/{self.optimizer}"

    def recipe(self, seed: int) -> Recipe:
        """Return the run of a seed."""
        beta1, beta2 = LION_BETAS
        return Recipe(self.steps, beta2, beta1, seed, self.task, self.peak_lr, self.weight_decay)


# AdEMAMix's learning rates are the best of five for float32 with seed 6: of 0.0003, 0.0006, 0.001,
# 0.002 and 0.003 on text, of 0.0003, 0.001, 0.002, 0.003 and 0.006 on convolutions.
SETTINGS = (
    Setting("text", "Lion", TextTask(), steps=240, peak_lr=3e-4, weight_decay=0.1),
    Setting("text", "SGD", TextTask(), steps=240, peak_lr=0.1, weight_decay=0.0),
    Setting("text", "AdEMAMix", TextTask(), steps=240, peak_lr=6e-4, weight_decay=0.1),
    Setting("convolutions", "Lion", ImageTask(), steps=600, peak_lr=1e-3, weight_decay=0.1),
    Setting("convolutions", "SGD", ImageTask(), steps=600, peak_lr=0.1, weight_decay=0.0),
    Setting("convolutions", "AdEMAMix", ImageTask(), steps=600, peak_lr=3e-3, weight_decay=0.1),
)


def make_optimizer(name: str, states: str, model: nn.Module, recipe: Recipe) -> Optimizer:
    """Return an optimizer for a run, in a codec or in float32.

    SGD has Nesterov's momentum.  AdEMAMix's alpha and beta3 come up over the whole run, as in its
    paper.
    """
    named = model.named_parameters()
    options = {"weight_decay": recipe.weight_decay, **zero8_states(states)}
    if name == "Lion":
        return Lion8bitBlockwise(named, betas=LION_BETAS, **options)
    if name == "AdEMAMix":
        steps = recipe.steps
        return AdEMAMix8bitBlockwise(
            named, betas=MIX_BETAS, t_alpha=steps, t_beta3=steps, **options
        )
    return SGD8bitBlockwise(named, momentum=MOMENTUM, nesterov=True, **options)


def final_loss(recipe: Recipe, optimizer: str, states: str, on_step: Callable[[], None]) -> float:
    """Train with one optimizer and return the validation loss."""
    run = TrainingRun(recipe)
    return train(run, make_optimizer(optimizer, states, run.model, recipe), on_step)


def jobs_of(setting: Setting, states: str, seeds: Sequence[int]) -> list[Job]:
    """Return the runs of all seeds."""
    recipes = [setting.recipe(seed) for seed in seeds]
    return [
        Job(final_loss, (recipe, setting.optimizer, states), setting.steps) for recipe in recipes
    ]


def loss_jobs(settings: Sequence[Setting], seeds: Sequence[int]) -> list[Job]:
    """Return all runs of some settings."""
    return [
        job for setting in settings for states in STATES for job in jobs_of(setting, states, seeds)
    ]


def loss_rows(
    settings: Sequence[Setting], seeds: Sequence[int], results: dict[Job, Any]
) -> list[dict]:
    """Return a row per setting and states."""
    rows = []
    for setting in settings:
        losses = {
            states: [results[job] for job in jobs_of(setting, states, seeds)] for states in STATES
        }
        rows += rows_of(setting, seeds, losses)
    return rows


def rows_of(
    setting: Setting,
    seeds: Sequence[int],
    losses: dict[str, list[float]],
    fp32: list[float] | None = None,
) -> list[dict]:
    """Return a row per states from the final losses, in the order of the seeds.

    Args:
        setting: what was trained.
        seeds: of the trainings.
        losses: of every states, a loss per seed.
        fp32: the losses to compare with; by default those of zero8's float32 states.
    """
    fp32 = losses[FP32_CONTROL] if fp32 is None else fp32
    rows = [
        {
            "task": setting.task_name,
            "optimizer": setting.optimizer,
            "states": states,
            "steps": setting.steps,
            "peak_lr": setting.peak_lr,
            "weight_decay": setting.weight_decay,
            "seeds": list(seeds),
            "val_loss_lowest": min(found),
            "val_loss_highest": max(found),
            "mean_within_fp32s_range": min(fp32) <= sum(found) / len(found) <= max(fp32),
            **loss_statistics(found, fp32),
        }
        for states, found in losses.items()
    ]
    for row in rows:
        row["difference_standard_error"] = row["difference_std"] / math.sqrt(len(seeds))
    return rows
