# SPDX-License-Identifier: Apache-2.0
"""Measure steps in the backward on the CPU: gradients alive at one time, and times.

Writes OUT (JSON), and a table (.md) beside it, if the weights have the bits of steps after it.
"""

import argparse
import shlex
import time
from pathlib import Path

import torch

from zero8.bench import record
from zero8.bench.backward.measure import BATCH, PLAIN, measure
from zero8.bench.backward.report import REMARK, markdown
from zero8.bench.step.report import busy_lines
from zero8.bench.step.targets import at_least
from zero8.bench.step.timing import threads
from zero8.bench.usage import check_least

OPTIONS = {
    "steps": (40, 2, "measured iterations of every loop"),
    "threads": (None, 1, "of torch, default all"),
    "hidden": (2048, 1, "width of the model"),
    "layers": (12, 1, "linear layers of the model"),
}
"""Options by name: default, least value, and meaning."""

# With a smaller share of the step there is little to hide, and the times are meaningless.
LEAST_SHARE = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the measurement to a parser."""
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="result file")
    for name, (default, _, meaning) in OPTIONS.items():
        help_text = meaning if default is None else f"{meaning}, default {default}"
        parser.add_argument(f"--{name}", type=int, metavar="N", default=default, help=help_text)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write both files, print the share of the step; return the exit status.

    Raises:
        RuntimeError: if the weights differ from those of steps after the backward; writes nothing.
    """
    if arguments.threads is None:
        arguments.threads = torch.get_num_threads()
    for name, (_, least, _) in OPTIONS.items():
        check_least(f"--{name}", getattr(arguments, name), least)
    began = time.perf_counter()
    result = _result(arguments)
    result |= {"seconds": time.perf_counter() - began, "command": _command(arguments)}
    files = record.write(result, arguments.json, markdown)
    record.print_checks(result["checks"])
    for line in busy_lines(result):
        print(line)
    print("wrote", *files)
    return 0


def _command(arguments: argparse.Namespace) -> str:
    words = ["zero8", "bench", "backward", "--json", str(arguments.json)]
    for name in OPTIONS:
        words += [f"--{name}", str(getattr(arguments, name))]
    return shlex.join(words)


def _result(arguments: argparse.Namespace) -> dict:
    hidden, layers = arguments.hidden, arguments.layers
    machine = record.machine()  # before the measurement loads it
    with threads(arguments.threads):
        rows = measure(hidden, layers, arguments.steps)
    plain = next(row for row in rows if row["name"] == PLAIN)
    share = plain["step_ms"] / plain["iteration_ms"]
    return {
        "hidden": hidden,
        "layers": layers,
        "batch": BATCH,
        "params": layers * (hidden * hidden + hidden),
        "threads": arguments.threads,
        "steps": arguments.steps,
        "rows": rows,
        "remark": REMARK,
        "checks": [at_least("step() over the iteration, plain loop", share, LEAST_SHARE)],
        "versions": record.versions(),
        "commit": record.commit(),
        "cpu": record.cpu(),
        "machine": machine,
    }
