# SPDX-License-Identifier: Apache-2.0
"""Measure what 8-bit states of SGD's and Lion's moment cost, and of Adam's beside them.

Writes OUT (JSON) and tables (.md) beside it.

Keys of the JSON object:
    versions, commit, cpu, workers, steps, command, seconds, cpu_seconds: what was run.
    averages: errors of a moving average, a row per beta and code, with the bound of Panter and
        Dite for 256 levels.
    signs: shares of Lion's updates that have the wrong sign, a row per pair of betas and codec.
    adam: errors of Adam's update, a row per pair of betas and codec.
    losses: final validation losses, a row per task, optimizer and states.
"""

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fidelity import runs
from benchmarks.fidelity.pool import Job, cores, run_jobs
from benchmarks.fidelity.training import Recipe
from benchmarks.momentum.adam import BETA1S, adam
from benchmarks.momentum.averages import averages
from benchmarks.momentum.losses import loss_jobs, loss_rows
from benchmarks.momentum.report import markdown
from benchmarks.momentum.signs import signs
from zero8.bench import record

STEPS = 200
BETA2 = 0.999


def measure(workers: int) -> dict:
    """Run everything and return the result, all but the time and the command."""
    environment = runs.environment(workers, STEPS)
    recipe = Recipe(STEPS, BETA2)
    of_averages, of_signs = (Job(function, (recipe,), STEPS) for function in (averages, signs))
    of_adam = [Job(adam, (Recipe(STEPS, BETA2, beta1),), STEPS) for beta1 in BETA1S]
    jobs = [of_averages, of_signs, *of_adam, *loss_jobs()]
    results = run_jobs(jobs, workers=workers, label="momentum")
    return {
        "averages": results[of_averages],
        "signs": results[of_signs],
        "adam": [row for job in of_adam for row in results[job]],
        "losses": loss_rows(results),
        **environment,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write both files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.momentum", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="result file")
    out = parser.parse_args(argv).json
    began = time.perf_counter()
    result = measure(cores())
    repeat = shlex.join(["python", "-m", "benchmarks.momentum", "--json", str(out)])
    result |= runs.spent(began, repeat)
    print("wrote", *record.write(result, out, markdown))
    return 0
