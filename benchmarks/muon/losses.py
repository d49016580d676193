# SPDX-License-Identifier: Apache-2.0
"""Trainings to the end with Muon: validation losses with float32 and with 8-bit momentum."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from benchmarks.fidelity.losses import FP32, loss_job, train
from benchmarks.fidelity.pool import Job
from benchmarks.fidelity.schemes import FP32_CONTROL, Shadow
from benchmarks.fidelity.text import TextTask
from benchmarks.fidelity.training import Layout, Recipe, TrainingRun
from benchmarks.momentum.losses import Setting, rows_of
from benchmarks.muon.orthogonal import is_hidden, orthogonalized
from benchmarks.muon.states import nesterov

UPDATE_RMS = 0.2
"""What Moonlight's Muon (arXiv:2502.16982) scales the RMS of updates to, which is about AdamW's."""

TRAINED_STATES = (FP32_CONTROL, "log", "int8")
STEPS = 160
# By momentum.  The learning rates are the best for float32 with seed 6: of 0.001, 0.002, 0.003,
# 0.006, 0.01 and 0.02 with Muon (with momentum 0.99 of 0.003, 0.006 and 0.01), of 0.0003, 0.0006,
# 0.001, 0.002, 0.003 and 0.006 with AdamW.
PEAK_LRS = {0.95: 6e-3, 0.99: 6e-3}
MUONS = {
    momentum: Setting(
        "text", f"Muon {momentum}", TextTask(), steps=STEPS, peak_lr=lr, weight_decay=0.1
    )
    for momentum, lr in PEAK_LRS.items()
}
ADAMW = Setting("text", "AdamW", TextTask(), steps=STEPS, peak_lr=1e-3, weight_decay=0.1)


class Muon:
    """Muon on the hidden matrices of a model, AdamW on all other parameters; one learning rate.

    p' = (1 - lr*weight_decay) p - lr * 0.2 sqrt(max(rows, columns)) * orthogonalized(u)

    Attributes:
        param_groups: Muon's and AdamW's, as `TrainingRun.update` sets their learning rates.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, states: str, momentum: float):
        """Make the moment in one of `STATES`, of a momentum, and AdamW."""
        named = list(model.named_parameters())
        self._matrices = [p for name, p in named if is_hidden(name, p.shape)]
        others = [p for name, p in named if not is_hidden(name, p.shape)]
        names = tuple(name for name, p in named if is_hidden(name, p.shape))
        self._layout = Layout(names, tuple(tuple(p.shape) for p in self._matrices))
        self._momentum = Shadow(nesterov(states), self._layout, (momentum, momentum))
        decay = {"weight_decay": recipe.weight_decay}
        self._adamw = torch.optim.AdamW(others, betas=recipe.betas, fused=True, **decay)
        self._group = {"params": self._matrices, "lr": recipe.peak_lr, **decay}
        self.param_groups = [self._group, *self._adamw.param_groups]

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters from their gradients."""
        lr, decay = self._group["lr"], self._group["weight_decay"]
        update = self._momentum.update(torch.cat([p.grad.flatten() for p in self._matrices]))
        for p, u in zip(self._matrices, self._layout.views(update), strict=True):
            scale = UPDATE_RMS * math.sqrt(max(p.shape))
            p.mul_(1 - lr * decay).sub_(orthogonalized(u), alpha=lr * scale)
        self._adamw.step()


def final_loss(recipe: Recipe, states: str, momentum: float, on_step: Callable[[], None]) -> float:
    """Train with Muon and return the validation loss."""
    run = TrainingRun(recipe)
    return train(run, Muon(run.model, recipe, states, momentum), on_step)


def muon_jobs(momentum: float, states: str, seeds: Sequence[int]) -> list[Job]:
    """Return the trainings with Muon, a job per seed."""
    recipes = [MUONS[momentum].recipe(seed) for seed in seeds]
    return [Job(final_loss, (recipe, states, momentum), recipe.steps) for recipe in recipes]


def adamw_jobs(seeds: Sequence[int]) -> list[Job]:
    """Return the trainings with torch's AdamW, a job per seed."""
    return [loss_job(ADAMW.recipe(seed), FP32) for seed in seeds]


def loss_jobs(seeds: Sequence[int]) -> list[Job]:
    """Return all trainings."""
    kinds = product(MUONS, TRAINED_STATES)
    return [*(job for kind in kinds for job in muon_jobs(*kind, seeds)), *adamw_jobs(seeds)]


def loss_rows(seeds: Sequence[int], results: dict[Job, Any]) -> list[dict]:
    """Return a row per optimizer and states; AdamW is compared with the first Muon in float32."""
    rows, of_fp32 = [], []
    for momentum, setting in MUONS.items():
        found = {s: [results[job] for job in muon_jobs(momentum, s, seeds)] for s in TRAINED_STATES}
        rows += rows_of(setting, seeds, found)
        of_fp32.append(found[FP32_CONTROL])
    adamw = {FP32: [results[job] for job in adamw_jobs(seeds)]}
    return [*rows, *rows_of(ADAMW, seeds, adamw, fp32=of_fp32[0])]
