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
import time
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks import record
from benchmarks.fidelity import runs
from benchmarks.fidelity.pool import run_jobs
from benchmarks.fidelity.training import Recipe
from benchmarks.maps.carried import Carried
from benchmarks.maps.figures import draw
from benchmarks.maps.once import Once
from benchmarks.maps.pairs import PairTally
from benchmarks.maps.report import markdown
from benchmarks.maps.sensitivity import Sensitivity
from benchmarks.usage import UsageError

STEPS = 200
BETA2 = 0.999


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the files; return the exit status."""
    runs.check(arguments)
    began = time.perf_counter()
    result, tallies = measure(arguments.quick, arguments.steps, arguments.workers)
    result |= runs.spent(began, runs.command("benchmarks.maps", arguments, STEPS))
    files = record.write(result, arguments.json, markdown)
    print("wrote", *files, *draw(result, tallies, arguments.json))
    return 0


def measure(quick: bool, steps: int, workers: int) -> tuple[dict, dict[tuple[str, str], PairTally]]:
    """Return the result, all but the time and the command, and the tallies of pairs of codes."""
    environment = runs.environment(workers, steps)
    recipe = Recipe(steps, BETA2)
    once = Once(recipe)
    parts = (Carried(recipe), once, Sensitivity(recipe, quick))
    jobs = [job for part in parts for job in part.jobs()]
    results = run_jobs(jobs, workers=workers, label="maps")
    found = {key: value for part in parts for key, value in part.result(results).items()}
    return {**found, **environment, "recipe": asdict(recipe)}, once.tallies(results)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.maps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    runs.add_arguments(parser, STEPS, quick="fewer values of hyperparameters")
    arguments = parser.parse_args(argv)
    try:
        return run(arguments)
    except UsageError as error:
        parser.error(str(error))
