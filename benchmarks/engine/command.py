# SPDX-License-Identifier: Apache-2.0
"""Measure the steps of engines in turns: Adam8bitBlockwise, and DeepSpeed's AdamW or torch's.

With --algorithm muon: Muon8bitBlockwise and DeepSpeed's Muon.

Under ZeRO that is `engine.step()`, under FSDP2 clipping and the optimizer's step.

Writes OUT (JSON), and a table (.md) beside it.  Under a launcher, such as
torchrun, all ranks measure and rank 0 writes.
"""

import argparse
import logging
from collections.abc import Sequence
from itertools import product

import torch

from benchmarks import record
from benchmarks.engine.contenders import CONTENDERS
from benchmarks.engine.engines import ENGINES, SIDES, Case, join_ranks
from benchmarks.engine.measure import measure
from benchmarks.engine.report import markdown, title
from benchmarks.usage import UsageError, check_least, check_multiple, check_names, chosen
from zero8.algorithms.adam import ADAM
from zero8.bench import threads
from zero8.op import kernel
from zero8.ranks import numbers

MODULE = "benchmarks.engine"
DEFAULT_ENGINES = tuple(name for name in ENGINES if name != "ZeRO-1")
CLIPPING = ("1.0", "0.0")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = record.parser(MODULE, __doc__)
    made.add_argument("--algorithm", choices=CONTENDERS, default=ADAM.name, help="default adam")
    for name, default, help_text in (
        ("numel", 2**26, "parameters, default 2^26"),
        ("rounds", 10, "measured steps, default 10"),
        ("threads", torch.get_num_threads(), "of torch in each rank, default all"),
    ):
        made.add_argument(f"--{name}", type=int, default=default, metavar="N", help=help_text)
    engines = f"of {','.join(ENGINES)}; default {','.join(DEFAULT_ENGINES)}; Muon's are of ZeRO"
    made.add_argument("--engines", metavar="LIST", help=engines)
    made.add_argument("--clipping", metavar="LIST", help="of 1.0 and 0.0 (none), default both")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write both files, print the table; return the exit status."""
    made = parser()
    arguments = made.parse_args(argv)
    try:
        cases = _cases(arguments)
    except UsageError as error:
        made.error(str(error))
    join_ranks()
    environment = record.environment(MODULE)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with threads(arguments.threads):
        rows = [row for case in cases for row in measure(case, arguments.rounds)]
    if numbers.rank() != 0:
        return 0
    ranks = numbers.num_ranks()
    if ranks > 1:
        start = f"torchrun --nproc-per-node {ranks}"
        environment["command"] = environment["command"].replace("python", start, 1)
    result = environment | {
        **{name: getattr(arguments, name) for name in ("algorithm", "numel", "rounds", "threads")},
        "world_size": ranks,
        "isa": kernel.default_isa(),
        "rows": rows,
    }
    record.write(result, arguments.json, markdown, title(result))
    print(*markdown(result), sep="\n")
    return 0


def _cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases to measure, or raise UsageError."""
    unit = SIDES[arguments.algorithm] ** 2
    check_multiple("--numel", arguments.numel, unit, unit)
    check_least("--rounds", arguments.rounds, 2)
    check_least("--threads", arguments.threads, 1)
    valid = tuple(CONTENDERS[arguments.algorithm])
    engines = chosen(arguments.engines, tuple(name for name in DEFAULT_ENGINES if name in valid))
    clipping = chosen(arguments.clipping, CLIPPING)
    check_names("--engines", engines, valid)
    check_names("--clipping", clipping, CLIPPING)
    return [
        Case(engine, limit, arguments.numel, arguments.algorithm)
        for engine, limit in product(engines, map(float, clipping))
    ]
