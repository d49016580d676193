# SPDX-License-Identifier: Apache-2.0
"""Compare the codecs of Adam's states, on recorded gradients and by final losses.

Writes OUT (JSON) and tables (.md) beside it.

Keys of the JSON object:
    versions, commit, cpu, workers, command, seconds, cpu_seconds: what was run.
    updates: update errors, a row per setting, beta2 and codec; see `fidelity.metrics.Tally`.
    silence: how far weights go whose gradient has ended, a row per beta2 and codec.
    losses: final validation losses, a row per codec.
    skipped: what could not run, and why.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.codecs.report import markdown
from benchmarks.fidelity import runs
from benchmarks.fidelity.losses import FP32, loss_job, loss_statistics
from benchmarks.fidelity.pool import Job, run_jobs
from benchmarks.fidelity.robustness import SETTINGS, replay_codecs
from benchmarks.fidelity.silence import Silence
from benchmarks.fidelity.states import BETA2S
from benchmarks.fidelity.training import Recipe
from zero8.spec.codec import CODECS

REPLAYED_STEPS = 600
REPLAYED: dict[str, dict] = {
    "GPT": {},
    **{name: SETTINGS[name] for name in ("lr x 10", "embedding")},
}
TRAINED_STEPS = 400
SEEDS = (1, 2, 3, 4, 5)
SILENT = Silence(1200)


def _replay(setting: str, beta2: float) -> Job:
    recipe = Recipe(REPLAYED_STEPS, beta2, **REPLAYED[setting])
    return Job(replay_codecs, (recipe,), REPLAYED_STEPS)


def _trainings(scheme: str) -> list[Job]:
    return [loss_job(Recipe(TRAINED_STEPS, BETA2S[0], seed=seed), scheme) for seed in SEEDS]


def jobs() -> list[Job]:
    """Return everything that is to be run."""
    replays = [_replay(setting, beta2) for setting in REPLAYED for beta2 in BETA2S]
    trainings = [job for scheme in (FP32, *CODECS) for job in _trainings(scheme)]
    return [*replays, *SILENT.jobs(), *trainings]


def rows_of(results: dict[Job, Any]) -> dict:
    """Return the rows of the result, from the results of all jobs."""
    updates, skipped = [], []
    for setting in REPLAYED:
        for beta2 in BETA2S:
            rows, missing = results[_replay(setting, beta2)]
            updates += [{"setting": setting, "steps": REPLAYED_STEPS, **row} for row in rows]
            skipped += [{"setting": setting, **entry} for entry in missing]
    fp32 = [results[job] for job in _trainings(FP32)]
    losses = [
        {
            "scheme": scheme,
            "beta2": BETA2S[0],
            "steps": TRAINED_STEPS,
            "seeds": list(SEEDS),
            **loss_statistics([results[job] for job in _trainings(scheme)], fp32),
        }
        for scheme in (FP32, *CODECS)
    ]
    return {"updates": updates, **SILENT.result(results), "losses": losses, "skipped": skipped}


def measure(workers: int) -> dict:
    """Run everything and return the result, all but the time and the command."""
    environment = runs.environment(workers)
    return {**rows_of(run_jobs(jobs(), workers=workers, label="codecs")), **environment}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write both files."""
    return runs.main("benchmarks.codecs", __doc__, measure, markdown, argv)
