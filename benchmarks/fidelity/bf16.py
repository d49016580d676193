# SPDX-License-Identifier: Apache-2.0
"""Bfloat16 weights without float32 masters: how they are rounded, and what that costs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fidelity.losses import FP32, loss_job, loss_statistics, train
from benchmarks.fidelity.metrics import weight_distance
from benchmarks.fidelity.pool import Job
from benchmarks.fidelity.schemes import Named
from benchmarks.fidelity.training import Gradients, Layout, Recipe, TrainingRun, adamw
from zero8.optimizer import Adam8bitBlockwise

# What the optimizer is told, per way to keep the weights.
ROUNDINGS = {
    "nearest": {"stochastic_rounding": False},
    "hash": {"stochastic_rounding": "hash"},
    "dither": {"stochastic_rounding": "dither"},
    "corrected": {"weight_correction_bits": 8},
}
# Trained in a closed loop; the replay tells the two stochastic roundings apart better than a loss.
TRAINED = (FP32, *(name for name in ROUNDINGS if name != "hash"))
CORRECTED = "corrected"
BETA2 = 0.999


def optimizer_of(named: Named, recipe: Recipe, rounding: str) -> Adam8bitBlockwise:
    """Return zero8's optimizer with the default codec and one way to keep bfloat16 weights."""
    return Adam8bitBlockwise(
        named, betas=recipe.betas, weight_decay=recipe.weight_decay, **ROUNDINGS[rounding]
    )


# --- Closed loop ---------------------------------------------------------------------------------


class Bf16Model:
    """The bfloat16 weights of a model that computes in float32 with exactly their values."""

    def __init__(self, model: nn.Module, recipe: Recipe, rounding: str):
        """Round the model's weights and make their optimizer."""
        self._pairs = [(p, nn.Parameter(p.detach().bfloat16())) for p in model.parameters()]
        names = (name for name, _ in model.named_parameters())
        narrow = (narrow for _, narrow in self._pairs)
        self._optimizer = optimizer_of(list(zip(names, narrow, strict=True)), recipe, rounding)
        self._hand_over()

    @property
    def param_groups(self) -> list[dict]:
        """The optimizer's, for the learning rate."""
        return self._optimizer.param_groups

    @torch.no_grad()
    def _hand_over(self) -> None:
        for wide, narrow in self._pairs:
            wide.copy_(narrow)

    def step(self) -> None:
        """Step on the model's gradients, rounded to bfloat16."""
        for wide, narrow in self._pairs:
            narrow.grad = wide.grad.bfloat16()
        self._optimizer.step()
        self._hand_over()


def final_loss_bf16(recipe: Recipe, rounding: str, on_step: Callable[[], None]) -> float:
    """Train on bfloat16 weights and return the validation loss."""
    run = TrainingRun(recipe)
    return train(run, Bf16Model(run.model, recipe, rounding), on_step)


# --- Replay --------------------------------------------------------------------------------------


class ReplayedWeights:
    """A run's matrices, stepped on gradients that come from elsewhere."""

    def __init__(self, start: Tensor, layout: Layout, recipe: Recipe, rounding: str):
        """Begin at flat weights, whose dtype is kept."""
        self.flat = start.clone()
        self._layout = layout
        self._params = layout.views(self.flat)
        named = list(zip(layout.names, self._params, strict=True))
        self.optimizer = optimizer_of(named, recipe, rounding)

    def set_gradients(self, grad: Tensor) -> None:
        """Take flat bfloat16 gradients."""
        grads = self._layout.views(grad.to(self.flat.dtype))
        for p, g in zip(self._params, grads, strict=True):
            p.grad = g

    def with_corrections(self) -> Tensor:
        """Return the flat weights with the 8 bits that are kept beside them, float32."""
        state = self.optimizer.state
        corrections = torch.cat([state[p]["param_correction"].view(-1) for p in self._params])
        bits = self.flat.view(torch.int16).to(torch.int32) << 16
        return (bits + (corrections.to(torch.int32) << 8)).view(torch.float32)


def weight_distances(recipe: Recipe, on_step: Callable[[], None]) -> list[dict]:
    """Step the matrices of an fp32 run, kept in bfloat16, on that run's gradients.

    Their moments are those of the float32 weights that they are compared with: the same gradients,
    rounded to bfloat16 for both, go through the same codec.  Only the weights' rounding differs.

    Returns:
        A row for every way to keep the weights.
    """
    run = TrainingRun(recipe)
    trainer, gradients = adamw(run.model, recipe), Gradients(run)
    parameters, layout = dict(run.model.named_parameters()), gradients.layout
    start = torch.cat([parameters[name].detach().view(-1) for name in layout.names]).bfloat16()
    reference = ReplayedWeights(start.float(), layout, recipe, "nearest")
    kept = {name: ReplayedWeights(start, layout, recipe, name) for name in ROUNDINGS}
    for step in range(recipe.steps):
        grad = gradients.next(step).bfloat16()
        for weights in (reference, *kept.values()):
            weights.set_gradients(grad)
            run.update(weights.optimizer, step)
        run.update(trainer, step)
        on_step()
    stored = {name: weights.flat.float() for name, weights in kept.items()}
    stored["corrected, with its 8 bits"] = kept[CORRECTED].with_corrections()
    travelled = (reference.flat - start.float()).norm()
    return [
        {
            "weights": name,
            **weight_distance(flat, reference.flat),
            "share_of_way": ((flat - reference.flat).norm() / travelled).item(),
        }
        for name, flat in stored.items()
    ]


# --- Both ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bf16Weights:
    """The measurement: one replay, and a closed loop of several seeds."""

    steps: int
    seeds: tuple[int, ...]

    def _recipe(self, seed: int = 0) -> Recipe:
        return Recipe(self.steps, BETA2, seed=seed)

    def _replay_job(self) -> Job:
        return Job(weight_distances, (self._recipe(),), self.steps)

    def _loss_jobs(self, rounding: str) -> list[Job]:
        recipes = [self._recipe(seed) for seed in self.seeds]
        if rounding == FP32:
            return [loss_job(recipe, FP32) for recipe in recipes]
        return [Job(final_loss_bf16, (recipe, rounding), self.steps) for recipe in recipes]

    def jobs(self) -> list[Job]:
        """Return what is to be run."""
        losses = [job for rounding in TRAINED for job in self._loss_jobs(rounding)]
        return [self._replay_job(), *losses]

    def result(self, results: dict[Job, Any]) -> dict:
        """Return the rows of the replay and of the closed loop."""
        losses = {name: [results[job] for job in self._loss_jobs(name)] for name in TRAINED}
        closed_loop = [
            {
                "weights": name,
                "beta2": BETA2,
                "seeds": list(self.seeds),
                "steps": self.steps,
                **loss_statistics(values, losses[FP32]),
            }
            for name, values in losses.items()
        ]
        replay = results[self._replay_job()]
        return {"bf16_weights": {"replay": replay, "closed_loop": closed_loop}}
