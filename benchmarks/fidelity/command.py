# SPDX-License-Identifier: Apache-2.0
"""Measure what 8-bit states cost: update errors on recorded gradients, and final losses.

Writes OUT (JSON), and a table (.md) and a figure (.png) beside it.

Keys of the JSON object; what only the full measurement has is marked (full):
    default, versions, commit, cpu, workers, steps, recipe, command, seconds, cpu_seconds: what
        was run.
    rows: update errors, a row per scheme and beta2; see `fidelity_metrics.Tally`.
    closed_loop: final validation losses, a row per scheme and beta2.
    bf16_weights (full): bfloat16 weights without float32 masters. `replay`: how far they end from
        float32 weights that took the same updates, in ulps and as a share of the way that those
        went; `closed_loop`: final validation losses. A row per way to round them.
    robustness (full): update errors in other settings, a row per setting, beta2 and scheme.
    silence (full): how far weights go on whose gradient has ended beside others, per scheme and
        beta2, in units of lr: `way`, its ratio to fp32's, and the mean |u| of the last step.
    resonance (full): errors on periodic gradients, a row per beta2, period and pattern: with the
        dither and with hashed thresholds, the ratio of the two RMS errors over all row lengths,
        and the row length where it is worst.
    skipped: what could not run, and why.
    checks: the targets, and whether they are met.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks import record
from benchmarks.fidelity import runs
from benchmarks.fidelity.bf16 import Bf16Weights
from benchmarks.fidelity.figure import plot
from benchmarks.fidelity.pool import Job, run_jobs
from benchmarks.fidelity.report import markdown, skipped_label
from benchmarks.fidelity.resonance import Resonance
from benchmarks.fidelity.robustness import Robustness
from benchmarks.fidelity.silence import Silence
from benchmarks.fidelity.states import ClosedLoop, Updates
from benchmarks.fidelity.targets import checks
from benchmarks.usage import UsageError
from zero8.spec.codec import DEFAULT_CODEC

STEPS = 1200


class Experiment(Protocol):
    """A part of the measurement."""

    def jobs(self) -> list[Job]:
        """Return what is to be run; a job that several parts need is run once."""

    def result(self, results: dict[Job, Any]) -> dict:
        """Return entries of the JSON object, from the results of all jobs of all parts."""


def experiments(quick: bool, steps: int) -> list[Experiment]:
    """Return the parts of the quick or of the full measurement, those of the longest jobs first."""
    seeds = (1, 2, 3) if quick else (1, 2, 3, 4, 5)
    updates, closed_loop = Updates(quick, steps), ClosedLoop(quick, steps, seeds)
    if quick:
        return [updates, closed_loop]
    return [
        updates,
        Resonance(longest=5 * steps),
        Robustness(steps // 2),
        Bf16Weights(steps, seeds),
        closed_loop,
        Silence(steps),
    ]


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the three files, print the targets; return the exit status."""
    runs.check(arguments)
    began = time.perf_counter()
    result = measure(arguments.quick, arguments.steps, arguments.workers)
    result |= runs.spent(began, runs.command("benchmarks.fidelity", arguments, STEPS))
    files = record.write(result, arguments.json, markdown, plot)
    record.print_checks(result["checks"])
    for entry in result["skipped"]:
        print(f"skipped {skipped_label(entry)}: {entry['reason']}")
    print("wrote", *files)
    return 0


def measure(quick: bool, steps: int, workers: int) -> dict:
    """Run all experiments and return the result, all but the time and the command."""
    environment = runs.environment(workers, steps)
    parts = experiments(quick, steps)
    results = run_jobs(
        (job for part in parts for job in part.jobs()), workers=workers, label="fidelity"
    )
    found = [part.result(results) for part in parts]
    result = {
        "default": DEFAULT_CODEC,
        **{key: value for entries in found for key, value in entries.items()},
        "skipped": [entry for entries in found for entry in entries.get("skipped", [])],
        **environment,
    }
    return {**result, "checks": checks(result)}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__)
    runs.add_arguments(parser, STEPS, quick="main schemes only, under 10 minutes")
    arguments = parser.parse_args(argv)
    try:
        return run(arguments)
    except UsageError as error:
        parser.error(str(error))
