# SPDX-License-Identifier: Apache-2.0
"""The replay in other settings: seeds, learning rate, beta1, other models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.fidelity.images import ImageTask
from benchmarks.fidelity.lora import LoraTask
from benchmarks.fidelity.pool import Job
from benchmarks.fidelity.replay import replay
from benchmarks.fidelity.schemes import deepspeed_bf16, zero8_scheme
from benchmarks.fidelity.states import BETA2S
from benchmarks.fidelity.training import Recipe
from benchmarks.fidelity.zipf import ZipfTask
from zero8.spec.codec import CODECS

# What differs from the main measurement.
SETTINGS = {
    "seed 1": {"seed": 1},
    "seed 2": {"seed": 2},
    "lr x 10": {"peak_lr": 1e-2},
    "beta1 0.8": {"beta1": 0.8},
    "beta1 0.95": {"beta1": 0.95},
    "beta1 0.98": {"beta1": 0.98},
    "embedding": {"task": ZipfTask()},
    "convolutions": {"task": ImageTask()},
    "LoRA": {"task": LoraTask()},
}


def replay_codecs(recipe: Recipe, on_step: Callable[[], None]) -> tuple[list[dict], list[dict]]:
    """Run the replay with all codecs and with DeepSpeed's bfloat16 states."""
    schemes = [*(zero8_scheme(codec) for codec in CODECS), deepspeed_bf16()]
    return replay(recipe, schemes, on_step)


@dataclass(frozen=True)
class Robustness:
    """The measurement: a replay per setting and beta2."""

    steps: int

    def _jobs_of_settings(self) -> list[tuple[str, Job]]:
        cases = [(name, beta2) for name in SETTINGS for beta2 in BETA2S]
        recipes = [(name, Recipe(self.steps, beta2, **SETTINGS[name])) for name, beta2 in cases]
        return [(name, Job(replay_codecs, (recipe,), self.steps)) for name, recipe in recipes]

    def jobs(self) -> list[Job]:
        """Return the replays."""
        return [job for _, job in self._jobs_of_settings()]

    def result(self, results: dict[Job, Any]) -> dict:
        """Return a row per setting, beta2 and scheme, and what was skipped."""
        found = [(name, *results[job]) for name, job in self._jobs_of_settings()]
        return {
            "robustness": [{"setting": name, **row} for name, rows, _ in found for row in rows],
            "skipped": [{"setting": name, **e} for name, _, skipped in found for e in skipped],
        }
