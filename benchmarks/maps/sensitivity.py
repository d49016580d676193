# SPDX-License-Identifier: Apache-2.0
"""Final losses around the default hyperparameters, with states in 32 and in 8 bits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.fidelity.losses import FP32, train
from benchmarks.fidelity.pool import Job
from benchmarks.fidelity.training import Recipe, TrainingRun
from benchmarks.maps.codes import LOG
from benchmarks.maps.once import EPS
from zero8.optimizer import Adam8bitBlockwise

FIELDS = {
    "lr": "peak_lr",
    "beta1": "beta1",
    "beta2": "beta2",
    "eps": None,
    "weight decay": "weight_decay",
}
"""The field of `Recipe` that a hyperparameter has; eps is not among them."""
VALUES = {
    "lr": (3e-4, 3e-3, 1e-2),
    "beta1": (0.8, 0.95, 0.98),
    "beta2": (0.95, 0.99, 0.9999),
    "eps": (1e-10, 1e-6, 1e-4),
    "weight decay": (0.0, 0.1, 1.0),
}
"""What each is set to, the others keeping their defaults."""


@dataclass(frozen=True)
class Setting:
    """One hyperparameter that differs from the default, or "default" and None."""

    hyperparameter: str
    value: float | None


DEFAULT = Setting("default", None)


def final_loss_with_eps(
    recipe: Recipe, eps: float, scheme: str, on_step: Callable[[], None]
) -> float:
    """Train with torch's AdamW (`fp32`) or with a codec of zero8; return the validation loss."""
    run = TrainingRun(recipe)
    options = {"betas": recipe.betas, "eps": eps, "weight_decay": recipe.weight_decay}
    if scheme == FP32:
        optimizer = torch.optim.AdamW(run.model.parameters(), fused=True, **options)
    else:
        optimizer = Adam8bitBlockwise(run.model.named_parameters(), codec=scheme, **options)
    return train(run, optimizer, on_step)


@dataclass(frozen=True)
class Sensitivity:
    """The measurement: a run per setting and scheme, and more seeds of the default."""

    recipe: Recipe
    quick: bool

    @property
    def schemes(self) -> tuple[str, ...]:
        """What the states are kept in."""
        return (FP32, LOG) if self.quick else (FP32, LOG, "dynamic")

    def _cases(self) -> list[tuple[Setting, tuple[int, ...]]]:
        """Return the settings and the seeds of each."""
        chosen = {n: (x[0], x[-1]) if self.quick else x for n, x in VALUES.items()}
        settings = [Setting(name, value) for name, values in chosen.items() for value in values]
        seeds = (0,) if self.quick else (0, 1, 2)
        return [(DEFAULT, seeds), *((setting, (0,)) for setting in settings)]

    def _job(self, setting: Setting, scheme: str, seed: int) -> Job:
        recipe, eps = replace(self.recipe, seed=seed), EPS
        if setting.hyperparameter == "eps":
            eps = setting.value
        elif setting != DEFAULT:
            recipe = replace(recipe, **{FIELDS[setting.hyperparameter]: setting.value})
        return Job(final_loss_with_eps, (recipe, eps, scheme), recipe.steps)

    def jobs(self) -> list[Job]:
        """Return the runs."""
        return [
            self._job(setting, scheme, seed)
            for setting, seeds in self._cases()
            for scheme in self.schemes
            for seed in seeds
        ]

    def result(self, results: dict[Job, Any]) -> dict:
        """Return the defaults, and a row per setting: the losses of each scheme, by seed."""
        rows = [
            {
                "hyperparameter": setting.hyperparameter,
                "value": setting.value,
                "seeds": list(seeds),
                "val_losses": {
                    scheme: [results[self._job(setting, scheme, seed)] for seed in seeds]
                    for scheme in self.schemes
                },
            }
            for setting, seeds in self._cases()
        ]
        defaults = {n: getattr(self.recipe, f) if f else EPS for n, f in FIELDS.items()}
        return {"defaults": defaults, "sensitivity": rows}
