# SPDX-License-Identifier: Apache-2.0
"""Measure what moments of SGD, Lion and AdEMAMix cost in 8 bits, and Adam's beside them.

Writes OUT (JSON) and tables (.md) beside it.

Keys of the JSON object; with --losses it has no steps, averages, signs and adam:
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
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks import record
from benchmarks.fidelity import runs
from benchmarks.fidelity.pool import Job, cores, run_jobs
from benchmarks.fidelity.training import Recipe
from benchmarks.momentum.adam import BETA1S, adam
from benchmarks.momentum.averages import averages
from benchmarks.momentum.losses import SETTINGS, loss_jobs, loss_rows
from benchmarks.momentum.report import markdown
from benchmarks.momentum.signs import signs
from benchmarks.usage import UsageError, check_least

STEPS = 200
BETA2 = 0.999
SEEDS = 5


def measure(workers: int, seeds: Sequence[int]) -> dict:
    """Run everything and return the result, all but the time and the command."""
    environment = runs.environment(workers, STEPS)
    recipe = Recipe(STEPS, BETA2)
    of_averages, of_signs = (Job(function, (recipe,), STEPS) for function in (averages, signs))
    of_adam = [Job(adam, (Recipe(STEPS, BETA2, beta1),), STEPS) for beta1 in BETA1S]
    jobs = [of_averages, of_signs, *of_adam, *loss_jobs(SETTINGS, seeds)]
    results = run_jobs(jobs, workers=workers, label="momentum")
    return {
        "averages": results[of_averages],
        "signs": results[of_signs],
        "adam": [row for job in of_adam for row in results[job]],
        "losses": loss_rows(SETTINGS, seeds, results),
        **environment,
    }


def measure_losses(workers: int, seeds: Sequence[int], names: Collection[str]) -> dict:
    """Train with some settings only; the result is as that of `measure`."""
    environment = runs.environment(workers, STEPS)
    del environment["steps"]  # of the recorded run; trainings have their own
    settings = [setting for setting in SETTINGS if setting.name in names]
    results = run_jobs(loss_jobs(settings, seeds), workers=workers, label="losses")
    return {"losses": loss_rows(settings, seeds, results), **environment}


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.momentum",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="result file")
    parser.add_argument(
        "--losses",
        nargs="+",
        choices=names,
        default=[],
        metavar="NAME",
        help=f"train with these settings, and measure nothing else: {', '.join(names)}",
    )
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help="trainings of every kind (default: %(default)s)"
    )
    parser.add_argument(
        "--first-seed", type=int, default=1, help="seed of the first (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    try:
        check_least("--seeds", arguments.seeds, 2)
        check_least("--first-seed", arguments.first_seed, 0)
    except UsageError as error:
        parser.error(str(error))
    return arguments


def command_of(arguments: argparse.Namespace) -> str:
    """Return the command that repeats a measurement."""
    flags = ["--losses", *arguments.losses] if arguments.losses else []
    if arguments.seeds != SEEDS:
        flags += ["--seeds", str(arguments.seeds)]
    if arguments.first_seed != 1:
        flags += ["--first-seed", str(arguments.first_seed)]
    flags += ["--json", str(arguments.json)]
    return shlex.join(["python", "-m", "benchmarks.momentum", *flags])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write both files."""
    arguments = arguments_of(argv)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    began = time.perf_counter()
    if arguments.losses:
        result = measure_losses(cores(), seeds, arguments.losses)
    else:
        result = measure(cores(), seeds)
    result |= runs.spent(began, command_of(arguments))
    print("wrote", *record.write(result, arguments.json, markdown))
    return 0
