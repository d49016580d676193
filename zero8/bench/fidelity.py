# SPDX-License-Identifier: Apache-2.0
"""Measure what 8-bit states cost: update errors on recorded gradients, and final losses.

Writes OUT (JSON), and a table (.md) and a figure (.png) beside it.
"""

import argparse
import os
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zero8.bench import record
from zero8.bench.fidelity_figure import plot
from zero8.bench.fidelity_report import markdown
from zero8.bench.fidelity_runs import FP32, final_loss, replay
from zero8.bench.fidelity_targets import checks
from zero8.bench.fidelity_training import Recipe
from zero8.bench.pool import run_jobs
from zero8.bench.schemes import FP32_CONTROL, full_schemes, quick_schemes
from zero8.codec import DEFAULT_CODEC
from zero8.op import kernel

STEPS = 1200
BETA2S = (0.999, 0.95)


@dataclass(frozen=True)
class Plan:
    """What is run: the replay for every beta2, the closed loop for some, with these seeds."""

    quick: bool
    steps: int

    @property
    def seeds(self) -> range:
        """Seeds of the closed loop."""
        return range(1, 4) if self.quick else range(1, 6)

    @property
    def closed_loop_schemes(self) -> tuple[str, ...]:
        """Optimizers of the closed loop."""
        return (FP32, DEFAULT_CODEC, "dynamic") + (FP32_CONTROL,) * (not self.quick)

    @property
    def closed_loop_beta2s(self) -> tuple[float, ...]:
        """Values of beta2 in the closed loop."""
        return BETA2S[:1] if self.quick else BETA2S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the measurement to a parser."""
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="result file")
    parser.add_argument("--quick", action="store_true", help="main schemes only, under 10 minutes")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of every run")
    parser.add_argument("--workers", type=int, default=_cores(), help="processes, one thread each")


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the three files, print the targets; return the exit status."""
    for name, least in (("steps", 2), ("workers", 1)):
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name}: got {getattr(arguments, name)}, expected at least {least}")
    plan = Plan(arguments.quick, arguments.steps)
    began = time.perf_counter()
    result = measure(plan, arguments.workers)
    result |= {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": _cpu_seconds(),
        "command": _command(arguments),
    }
    files = record.write(result, arguments.json, markdown, plot)
    record.print_checks(result["checks"])
    for entry in result["skipped"]:
        print(f"skipped {entry['scheme']} at beta2 {entry['beta2']}: {entry['reason']}")
    print("wrote", *files)
    return 0


def _cpu_seconds() -> float:
    """Return the CPU time of this process and its workers: what a busy machine does not stretch."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _command(arguments: argparse.Namespace) -> str:
    flags = ["--quick"] * arguments.quick + ["--json", str(arguments.json)]
    flags += ["--steps", str(arguments.steps)] * (arguments.steps != STEPS)
    return shlex.join(["python", "-m", "zero8.bench.fidelity", *flags])


def measure(plan: Plan, workers: int) -> dict:
    """Run all jobs of a plan and return the result, all but the time and the command."""
    kernel.module()  # compiled here, rather than by two workers at a time
    replays = [Recipe(plan.steps, beta2) for beta2 in BETA2S]
    trainings = [
        (Recipe(plan.steps, beta2, seed=seed), scheme)
        for beta2 in plan.closed_loop_beta2s
        for scheme in plan.closed_loop_schemes
        for seed in plan.seeds
    ]
    jobs = [(replay_plan, (plan.quick, recipe)) for recipe in replays]
    jobs += [(final_loss, training) for training in trainings]
    results = run_jobs(jobs, total_steps=len(jobs) * plan.steps, workers=workers, label="fidelity")
    losses = dict(zip(trainings, results[len(replays) :], strict=True))
    result = {
        "default": DEFAULT_CODEC,
        "rows": [row for rows, _ in results[: len(replays)] for row in rows],
        "closed_loop": closed_loop(plan, losses),
        "skipped": [entry for _, skipped in results[: len(replays)] for entry in skipped],
        "versions": record.versions(),
        "cpu": record.cpu(),
        "workers": workers,
        "steps": plan.steps,
        "recipe": asdict(replays[0]),
    }
    return {**result, "checks": checks(result)}


def replay_plan(quick: bool, recipe: Recipe, on_step) -> tuple[list[dict], list[dict]]:
    """Run the replay with the schemes of the quick or the full measurement."""
    return replay(recipe, quick_schemes() if quick else full_schemes(), on_step)


def closed_loop(plan: Plan, losses: dict[tuple[Recipe, str], float]) -> list[dict]:
    """Return a row per scheme and beta2: the final losses, and their differences to fp32's.

    Differences are between runs of the same seed.
    """
    rows = []
    for beta2 in plan.closed_loop_beta2s:
        recipes = [Recipe(plan.steps, beta2, seed=seed) for seed in plan.seeds]
        for scheme in plan.closed_loop_schemes:
            values = [losses[recipe, scheme] for recipe in recipes]
            differences = [losses[r, scheme] - losses[r, FP32] for r in recipes]
            rows.append(
                {
                    "scheme": scheme,
                    "beta2": beta2,
                    "seeds": list(plan.seeds),
                    "steps": plan.steps,
                    "val_losses": values,
                    "val_loss_mean": statistics.mean(values),
                    "val_loss_std": statistics.stdev(values),
                    "difference_mean": statistics.mean(differences),
                    "difference_std": statistics.stdev(differences),
                }
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m zero8.bench.fidelity", description=__doc__)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        return run(arguments)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
