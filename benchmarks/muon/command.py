# SPDX-License-Identifier: Apache-2.0
"""Measure what 8-bit momentum does to the updates of Muon, and to its final losses.

Writes OUT (JSON) and tables (.md) beside it.

Keys of the JSON object:
    versions, commit, cpu, workers, steps, command, seconds, cpu_seconds: what was run.
    updates: errors of the update, before and after it is orthogonalized, a row per momentum and
        states, with a row per matrix in each.
    losses: final validation losses, a row per optimizer and states.
"""

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fidelity import runs
from benchmarks.fidelity.pool import Job, cores, run_jobs
from benchmarks.fidelity.training import Recipe
from benchmarks.muon.errors import update_errors
from benchmarks.muon.losses import loss_jobs, loss_rows
from benchmarks.muon.report import markdown
from zero8.bench import record

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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.muon",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="result file")
    out = parser.parse_args(argv).json
    began = time.perf_counter()
    result = measure(cores())
    result |= runs.spent(began, shlex.join(["python", "-m", "benchmarks.muon", "--json", str(out)]))
    print("wrote", *record.write(result, out, markdown))
    return 0
