# SPDX-License-Identifier: Apache-2.0
"""The main measurement: update errors of every scheme, and final losses of some."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.fidelity.losses import FP32, loss_job, loss_statistics
from benchmarks.fidelity.pool import Job
from benchmarks.fidelity.replay import replay
from benchmarks.fidelity.schemes import full_schemes, quick_schemes
from benchmarks.fidelity.training import Recipe
from zero8.spec.codec import DEFAULT_CODEC

BETA2S = (0.999, 0.95)


def replay_all(
    recipe: Recipe, quick: bool, on_step: Callable[[], None]
) -> tuple[list[dict], list[dict]]:
    """Run the replay with the schemes of the quick or the full measurement."""
    return replay(recipe, quick_schemes() if quick else full_schemes(), on_step)


@dataclass(frozen=True)
class Updates:
    """A replay for every beta2."""

    quick: bool
    steps: int

    def jobs(self) -> list[Job]:
        """Return the replays."""
        recipes = [Recipe(self.steps, beta2) for beta2 in BETA2S]
        return [Job(replay_all, (recipe, self.quick), self.steps) for recipe in recipes]

    def result(self, results: dict[Job, Any]) -> dict:
        """Return a row per scheme and beta2, what was skipped, and the recipe."""
        found = [results[job] for job in self.jobs()]
        return {
            "rows": [row for rows, _ in found for row in rows],
            "skipped": [entry for _, skipped in found for entry in skipped],
            "recipe": asdict(self.jobs()[0].arguments[0]),
        }


@dataclass(frozen=True)
class ClosedLoop:
    """Training to the end, for every seed: with some optimizers, at some values of beta2."""

    quick: bool
    steps: int
    seeds: tuple[int, ...]

    def _cases(self) -> list[tuple[str, float]]:
        schemes = (FP32, DEFAULT_CODEC, "dynamic")
        beta2s = BETA2S[:1] if self.quick else BETA2S
        return [(scheme, beta2) for beta2 in beta2s for scheme in schemes]

    def _jobs_of(self, scheme: str, beta2: float) -> list[Job]:
        return [loss_job(Recipe(self.steps, beta2, seed=seed), scheme) for seed in self.seeds]

    def jobs(self) -> list[Job]:
        """Return the runs."""
        return [job for case in self._cases() for job in self._jobs_of(*case)]

    def result(self, results: dict[Job, Any]) -> dict:
        """Return a row per scheme and beta2: final losses and their differences to fp32's."""
        rows = [
            {
                "scheme": scheme,
                "beta2": beta2,
                "seeds": list(self.seeds),
                "steps": self.steps,
                **loss_statistics(
                    [results[job] for job in self._jobs_of(scheme, beta2)],
                    [results[job] for job in self._jobs_of(FP32, beta2)],
                ),
            }
            for scheme, beta2 in self._cases()
        ]
        return {"closed_loop": rows}
