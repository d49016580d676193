# SPDX-License-Identifier: Apache-2.0
"""One quantization: moments of an fp32 run are encoded, decoded and compared at sampled steps.

Nothing of an error is carried to the next step: this is the error of the codes alone, which the
paper's figures 4 and 5 show.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.fidelity.pool import Job
from benchmarks.fidelity.training import Gradients, Recipe, TrainingRun, adamw
from benchmarks.maps.codes import GRAINS, NAMES, PairCode, code_of, positions
from benchmarks.maps.pairs import PairTally
from benchmarks.maps.shown import shown_maps

SAMPLES = 25
EPS = 1e-8
SHOWN_MATRIX = "blocks.0.mlp.0.weight"
"""Its moments at the end of the run make the maps that depend on data."""


def adam_update(m: Tensor, v: Tensor, step: int, betas: tuple[float, float]) -> Tensor:
    """Return u = mhat / (sqrt(vhat) + eps) at a step, counted from 1."""
    denominator = (v / (1 - betas[1] ** step)).sqrt() + EPS
    return m / (1 - betas[0] ** step) / denominator


def add_moments(
    tally: PairTally, code: PairCode, m: Tensor, v: Tensor, step: int, betas: tuple[float, float]
) -> None:
    """Encode and decode the moments of one matrix, and add its elements to a tally."""
    size = code.block_size or m.numel()
    m, v = m.reshape(-1, size), v.reshape(-1, size)
    state = code.encode(m, v, step)
    update = adam_update(*code.decode(state), step, betas)
    codes = positions(state["m"]), positions(state["v"])
    tally.add(*codes, update, adam_update(m, v, step, betas))


def once(recipe: Recipe, on_step: Callable[[], None]) -> tuple[dict, dict]:
    """Train in fp32, and quantize the moments of all matrices at SAMPLES steps.

    Returns:
        The tally of each (name, grain), and the maps that `shown_maps` makes.
    """
    tallies = {(name, grain): PairTally() for grain in GRAINS for name in NAMES}
    run = TrainingRun(recipe)
    trainer, gradients = adamw(run.model, recipe), Gradients(run)
    parameters = dict(run.model.named_parameters())
    every = max(1, recipe.steps // SAMPLES)
    for step in range(1, recipe.steps + 1):
        gradients.next(step - 1)
        run.update(trainer, step - 1)
        if (recipe.steps - step) % every == 0:
            for state in (trainer.state[parameters[name]] for name in gradients.layout.names):
                moments = state["exp_avg"], state["exp_avg_sq"]
                for (name, grain), tally in tallies.items():
                    add_moments(tally, code_of(name, grain), *moments, step, recipe.betas)
        on_step()
    state = trainer.state[parameters[SHOWN_MATRIX]]
    return tallies, shown_maps(state["exp_avg"], state["exp_avg_sq"])


@dataclass(frozen=True)
class Once:
    """The measurement: one run."""

    recipe: Recipe

    def job(self) -> Job:
        """Return the run."""
        return Job(once, (self.recipe,), self.recipe.steps)

    def jobs(self) -> list[Job]:
        """Return what is to be run."""
        return [self.job()]

    def tallies(self, results: dict[Job, Any]) -> dict[tuple[str, str], PairTally]:
        """Return the tally of each (name, grain)."""
        return results[self.job()][0]

    def result(self, results: dict[Job, Any]) -> dict:
        """Return the maps, and rows per map and grain: all elements, and by the code of m."""
        tallies, maps = results[self.job()]
        keys = [({"map": name, "grain": grain}, t) for (name, grain), t in tallies.items()]
        return {
            "maps": maps,
            "once": [{**key, **tally.result()} for key, tally in keys],
            "first_moment": [{**key, **tally.by_first_moment()} for key, tally in keys],
        }
