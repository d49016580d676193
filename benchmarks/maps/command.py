# SPDX-License-Identifier: Apache-2.0
"""Compare the maps of the 8-bit optimizers paper with `log`, on gradients of a small GPT.

Writes OUT (JSON), tables beside it (.md) and figures (OUT's name with _maps, _pairs, ...; .png).

Keys of the JSON object:
    versions, commit, cpu, workers, steps, recipe, command, seconds, cpu_seconds: what was run.
    maps: the values of the maps by moment, as shares of the scale, and the ranges of `log`.
    once: errors of the update when exact moments are quantized once, a row per map and grain.
    first_moment: the same by the code of m, in the order of the codes' values: share of the
        elements, mean errors, null where no element has the code.
    carried: errors with states kept in 8 bits for the whole run, a row per map and grain.
    defaults, sensitivity: final validation losses, a row per value of a hyperparameter.

What the pairs of codes have, 65536 numbers per map and grain, is in the figures only.
"""

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.fidelity.pool import cores, cpu_seconds, run_jobs
from benchmarks.fidelity.training import Recipe
from benchmarks.maps.carried import Carried
from benchmarks.maps.figures import draw
from benchmarks.maps.once import Once
from benchmarks.maps.pairs import PairTally
from benchmarks.maps.report import markdown
from benchmarks.maps.sensitivity import Sensitivity
from zero8.bench import record
from zero8.bench.usage import UsageError, check_least
from zero8.op import kernel

STEPS = 200
BETA2 = 0.999


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the measurement to a parser."""
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="result file")
    parser.add_argument("--quick", action="store_true", help="fewer values of hyperparameters")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of every run")
    parser.add_argument("--workers", type=int, default=cores(), help="processes, one thread each")


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the files; return the exit status."""
    for name, least in (("steps", 2), ("workers", 1)):
        check_least(f"--{name}", getattr(arguments, name), least)
    began = time.perf_counter()
    result, tallies = measure(arguments.quick, arguments.steps, arguments.workers)
    result |= {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": cpu_seconds(),
        "command": _command(arguments),
    }
    files = record.write(result, arguments.json, markdown)
    print("wrote", *files, *draw(result, tallies, arguments.json))
    return 0


def _command(arguments: argparse.Namespace) -> str:
    flags = ["--quick"] * arguments.quick + ["--json", str(arguments.json)]
    flags += ["--steps", str(arguments.steps)] * (arguments.steps != STEPS)
    return shlex.join(["python", "-m", "benchmarks.maps", *flags])


def measure(quick: bool, steps: int, workers: int) -> tuple[dict, dict[tuple[str, str], PairTally]]:
    """Return the result, all but the time and the command, and the tallies of pairs of codes."""
    kernel.module()  # compiled here, rather than by two workers at a time
    commit = record.commit()  # now: the checkout may move on before the last job has ended
    recipe = Recipe(steps, BETA2)
    once = Once(recipe)
    parts = (Carried(recipe), once, Sensitivity(recipe, quick))
    jobs = [job for part in parts for job in part.jobs()]
    results = run_jobs(jobs, workers=workers, label="maps")
    result = {key: value for part in parts for key, value in part.result(results).items()} | {
        "versions": record.versions(),
        "commit": commit,
        "cpu": record.cpu(),
        "workers": workers,
        "steps": steps,
        "recipe": asdict(recipe),
    }
    return result, once.tallies(results)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.maps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        return run(arguments)
    except UsageError as error:
        parser.error(str(error))
