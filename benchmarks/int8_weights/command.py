# SPDX-License-Identifier: Apache-2.0
"""Measure how far INT8 weights are from float32 ones, and what they cost a training, by rounding.

Writes OUT (JSON) and tables (.md) beside it.  Needs torchao: pip install 'zero8[torchao]'.

Keys of the JSON object:
    versions, commit, cpu, workers, command, seconds, cpu_seconds: what was run.
    distances: how far weights end from float32 ones that got the same gradients, a row per
        learning rate and way to keep them.
    losses: final validation losses, a row per way.
"""

from collections.abc import Sequence

from benchmarks.fidelity import runs
from benchmarks.fidelity.pool import Job, run_jobs
from benchmarks.fidelity.training import Recipe
from benchmarks.int8_weights.losses import BETA2, loss_jobs, loss_rows
from benchmarks.int8_weights.replay import distances
from benchmarks.int8_weights.report import markdown

REPLAYED_STEPS = 600
PEAK_LRS = (1e-3, 1e-4, 1e-5)


def measure(workers: int) -> dict:
    """Run everything and return the result, all but the time and the command."""
    environment = runs.environment(workers)
    replays = {
        peak_lr: Job(distances, (Recipe(REPLAYED_STEPS, BETA2, peak_lr=peak_lr),), REPLAYED_STEPS)
        for peak_lr in PEAK_LRS
    }
    jobs = [*replays.values(), *loss_jobs()]
    results = run_jobs(jobs, workers=workers, label="int8_weights")
    rows = [
        {"peak_lr": peak_lr, "steps": REPLAYED_STEPS, **row}
        for peak_lr, job in replays.items()
        for row in results[job]
    ]
    return {"distances": rows, "losses": loss_rows(results), **environment}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write both files."""
    return runs.main("benchmarks.int8_weights", __doc__, measure, markdown, argv)
