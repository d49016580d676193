# SPDX-License-Identifier: Apache-2.0
"""Measure the steps of engines in turns: Adam8bitBlockwise, and DeepSpeed's AdamW or torch's.

With --algorithm muon: Muon8bitBlockwise and DeepSpeed's Muon.

Under ZeRO that is `engine.step()`, under FSDP2 clipping and the optimizer's step.

Writes OUT (JSON), and a table (.md) and a figure (.png) beside it.  Under a launcher, such as
torchrun, all ranks measure and rank 0 writes.
"""

import argparse
import logging
import shlex
import time
from itertools import product
from pathlib import Path

import torch

from zero8.algorithms.adam import ADAM
from zero8.bench import record
from zero8.bench.engine.contenders import CONTENDERS
from zero8.bench.engine.engines import ENGINES, SIDES, Case, join_ranks
from zero8.bench.engine.measure import measure
from zero8.bench.engine.report import checks, markdown
from zero8.bench.step.timing import threads
from zero8.bench.usage import check_least, check_multiple, check_names, chosen
from zero8.op import kernel
from zero8.ranks import numbers

DEFAULT_ENGINES = tuple(name for name in ENGINES if name != "ZeRO-1")
CLIPPING = ("1.0", "0.0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the measurement to a parser."""
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="result file")
    parser.add_argument(
        "--algorithm", choices=CONTENDERS, default=ADAM.name, help="default %(default)s"
    )
    parser.add_argument(
        "--numel", type=int, default=2**26, metavar="N", help="parameters, default 2^26"
    )
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="measured steps, default 10"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of torch in each rank, default all"
    )
    parser.add_argument(
        "--engines",
        metavar="LIST",
        help=f"of {','.join(ENGINES)}; default {','.join(DEFAULT_ENGINES)}; Muon's are of ZeRO",
    )
    parser.add_argument(
        "--clipping", metavar="LIST", help="limits of the gradients' norm, default 1.0,0.0 (none)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, write both files, print the targets; return the exit status."""
    if arguments.threads is None:
        arguments.threads = torch.get_num_threads()
    unit = SIDES[arguments.algorithm] ** 2
    check_multiple("--numel", arguments.numel, unit, unit)
    check_least("--rounds", arguments.rounds, 2)
    check_least("--threads", arguments.threads, 1)
    valid = tuple(CONTENDERS[arguments.algorithm])
    engines = chosen(arguments.engines, tuple(name for name in DEFAULT_ENGINES if name in valid))
    clipping = chosen(arguments.clipping, CLIPPING)
    check_names("--engines", engines, valid)
    check_names("--clipping", clipping, CLIPPING)
    join_ranks()
    machine, began = record.machine(), time.perf_counter()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    rows: list[dict] = []
    with threads(arguments.threads):
        for engine, limit in product(engines, map(float, clipping)):
            case = Case(engine, limit, arguments.numel, arguments.algorithm)
            rows += measure(case, arguments.rounds)
    if numbers.rank() != 0:
        return 0
    result = {
        "algorithm": arguments.algorithm,
        "numel": arguments.numel,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "world_size": numbers.num_ranks(),
        "isa": kernel.default_isa(),
        "rows": rows,
        "checks": checks(rows),
        "versions": record.versions(),
        "commit": record.commit(),
        "cpu": record.cpu(),
        "machine": machine,
        "seconds": time.perf_counter() - began,
        "command": _command(arguments, engines, clipping),
    }
    from zero8.bench.engine.figure import plot  # needs matplotlib

    files = record.write(result, arguments.json, markdown, plot)
    record.print_checks(result["checks"])
    print("wrote", *files)
    return 0


def _command(
    arguments: argparse.Namespace, engines: tuple[str, ...], clipping: tuple[str, ...]
) -> str:
    program = ["zero8"]
    if (ranks := numbers.num_ranks()) > 1:
        program = ["torchrun", "--nproc-per-node", str(ranks), "-m", "zero8.cli"]
    words = [*program, "bench", "engine", "--json", str(arguments.json)]
    for name in ("algorithm", "numel", "rounds", "threads"):
        words += [f"--{name}", str(getattr(arguments, name))]
    return shlex.join([*words, "--engines", ",".join(engines), "--clipping", ",".join(clipping)])
