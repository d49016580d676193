# SPDX-License-Identifier: Apache-2.0
"""Trainings with the linear layers' weights kept in every way: final validation losses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.fidelity.losses import loss_statistics, train
from benchmarks.fidelity.pool import Job
from benchmarks.fidelity.training import Recipe, TrainingRun
from benchmarks.int8_weights.kinds import FLOAT32, KINDS, Weights

STEPS = 400
SEEDS = (1, 2, 3, 4)
BETA2 = 0.999


class KeptModel:
    """A model that computes in float32 from exactly the values of weights that are kept.

    These are the weights of the linear layers; the others are float32.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, kind: str):
        """Keep the weights, and hand their values to the model."""
        layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        self._matrices = {f"{name}.weight": layer.weight for name, layer in layers}
        others = [(n, p) for n, p in model.named_parameters() if n not in self._matrices]
        copies = {name: p.detach() for name, p in self._matrices.items()}
        self._weights = Weights(kind, copies, recipe, others)
        self._hand_over()

    @property
    def param_groups(self) -> list[dict]:
        """The optimizer's, for the learning rate."""
        return self._weights.param_groups

    @torch.no_grad()
    def _hand_over(self) -> None:
        for p, values in zip(self._matrices.values(), self._weights.values(), strict=True):
            p.copy_(values)

    def step(self) -> None:
        """Step on the model's gradients."""
        self._weights.set_gradients([p.grad for p in self._matrices.values()])
        self._weights.step()
        self._hand_over()


def final_loss(recipe: Recipe, kind: str, on_step: Callable[[], None]) -> float:
    """Train and return the validation loss."""
    run = TrainingRun(recipe)
    return train(run, KeptModel(run.model, recipe, kind), on_step)


def _jobs_of(kind: str) -> list[Job]:
    return [Job(final_loss, (Recipe(STEPS, BETA2, seed=seed), kind), STEPS) for seed in SEEDS]


def loss_jobs() -> list[Job]:
    """Return the trainings of all ways and seeds."""
    return [job for kind in KINDS for job in _jobs_of(kind)]


def loss_rows(results: dict[Job, Any]) -> list[dict]:
    """Return a row per way; differences are to float32 weights of the same seed."""
    losses = {kind: [results[job] for job in _jobs_of(kind)] for kind in KINDS}
    return [
        {
            "weights": kind,
            "seeds": list(SEEDS),
            "steps": STEPS,
            **loss_statistics(values, losses[FLOAT32]),
        }
        for kind, values in losses.items()
    ]
