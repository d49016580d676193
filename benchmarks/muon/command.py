# SPDX-License-Identifier: Apache-2.0
"""Measure what 8-bit momentum does to the updates of Muon, and to its final losses.

Writes OUT (JSON) and tables (.md) beside it.

Keys of the JSON object:
    versions, commit, cpu, workers, steps, command, seconds, cpu_seconds: what was run.
    updates: errors of the update, before and after it is orthogonalized, a row per momentum and
        states, with a row per matrix in each.
    losses: final validation losses, a row per optimizer and states.
"""

from collections.abc import Sequence

from benchmarks.fidelity import runs
from benchmarks.fidelity.pool import Job, run_jobs
from benchmarks.fidelity.training import Recipe
from benchmarks.muon.errors import update_errors
from benchmarks.muon.losses import loss_jobs, loss_rows
from benchmarks.muon.report import markdown

STEPS = 200
BETA2 = 0.999
SEEDS = range(1, 6)


def measure(workers: int) -> dict:
    """Run everything and return the result, all but the time and the command."""
    environment = runs.environment(workers, STEPS)
    of_updates = Job(update_errors, (Recipe(STEPS, BETA2),), STEPS)
    results = run_jobs([of_updates, *loss_jobs(SEEDS)], workers=workers, label="muon")
    return {
        "updates": results[of_updates],
        "losses": loss_rows(SEEDS, results),
        **environment,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write both files."""
    return runs.main("benchmarks.muon", __doc__, measure, markdown, argv)
