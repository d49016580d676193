# SPDX-License-Identifier: Apache-2.0
"""Measure steps on a CPU or a GPU: zero8's, other optimizers', and copies of the same memory.

Times one algorithm after the other, the steps of each in turns.  Writes OUT (JSON), and a table
(.md) beside it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks import gpu, record
from benchmarks.step import timing
from benchmarks.step.contenders import (
    ZERO8,
    Contender,
    Params,
    copies,
    peer_contenders,
    zero8_contenders,
)
from benchmarks.step.peers import PEERS, peers_on
from benchmarks.step.report import markdown, title
from benchmarks.usage import UsageError, check_least, check_multiple, check_names, chosen
from zero8.bench import COLUMNS, threads
from zero8.op import kernel
from zero8.spec.codec import CODECS

MODULE = "benchmarks.step"
ROUNDS = 30
NUMEL = {"cpu": 2**25, "cuda": 2**26}
"""Default number of parameters, which no cache holds, by device."""


@dataclass(frozen=True)
class Plan:
    """A measurement; raises UsageError on construction for invalid values."""

    device: str
    numel: int
    threads: int
    algorithms: tuple[str, ...]
    codecs: tuple[str, ...]
    against: tuple[str, ...]

    def __post_init__(self):
        """Check the values."""
        check_multiple("--numel", self.numel, COLUMNS, COLUMNS)
        check_least("--threads", self.threads, 1)
        check_names("--algorithm", self.algorithms, ZERO8)
        check_names("--codec", self.codecs, CODECS)
        check_names("--against", self.against, peers_on(self.device))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = record.parser(MODULE, __doc__)
    made.add_argument("--device", choices=NUMEL, default="cpu", help="default cpu")
    sizes = ", ".join(f"{numel} on {device}" for device, numel in NUMEL.items())
    made.add_argument("--numel", type=int, help=f"parameters, default {sizes}")
    made.add_argument("--threads", type=int, help="threads on the CPU, default all")
    made.add_argument("--algorithm", metavar="NAME,...", help=f"default {','.join(ZERO8)}")
    made.add_argument("--codec", metavar="NAME,...", help=f"default {','.join(CODECS)}")
    made.add_argument("--against", metavar="NAME,...", help=f"of {','.join(PEERS)}; default all")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write both files, print the table; return the exit status."""
    made = parser()
    arguments = made.parse_args(argv)
    absence = gpu.absence() if arguments.device == "cuda" else None
    if absence is not None:
        made.error(f"--device cuda: {absence}")
    try:
        plan = _plan(arguments)
    except UsageError as error:
        made.error(str(error))
    result = record.environment(MODULE) | measure(plan)
    record.write(result, arguments.json, markdown, title(result))
    print(*markdown(result), sep="\n")
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    device = arguments.device
    return Plan(
        device=device,
        numel=NUMEL[device] if arguments.numel is None else arguments.numel,
        threads=torch.get_num_threads() if arguments.threads is None else arguments.threads,
        algorithms=chosen(arguments.algorithm, ZERO8),
        codecs=chosen(arguments.codec, CODECS),
        against=chosen(arguments.against, peers_on(device)),
    )


def measure(plan: Plan) -> dict:
    """Return the result of a plan."""
    result = {
        "numel": plan.numel,
        "threads": plan.threads,
        "isa": "cuda" if plan.device == "cuda" else kernel.default_isa(),
        "gpu": gpu.machine() if plan.device == "cuda" else None,
    }
    params, skipped = Params(plan.numel, plan.device), {}
    rows: list[dict] = []
    with threads(plan.threads):
        for algorithm in plan.algorithms:
            ours = zero8_contenders(algorithm, plan.codecs, params)
            peers, missing = peer_contenders(algorithm, plan.against, params)
            skipped |= missing
            rows += _timed(algorithm, [*ours, *peers], plan)
    return result | {"rows": rows, "skipped": skipped}


def _timed(algorithm: str, steps: list[Contender], plan: Plan) -> list[dict]:
    on_gpu = plan.device == "cuda"
    time_call = timing.time_on_gpu if on_gpu else timing.time_by_the_wall
    contenders = [*steps, *copies(steps, plan.device)]
    timed = [timing.Timed(one.step, one.every) for one in contenders]
    rows = []
    samples = timing.interleaved(timed, ROUNDS, time_call)
    for one, measured in zip(contenders, samples, strict=True):
        times = timing.spread(measured.times, one.param.numel())
        rows.append(
            {
                "algorithm": algorithm,
                "name": one.name,
                "variant": one.variant,
                "codec": one.codec,
                "numel": one.param.numel(),
                "bytes_per_param": one.bytes_per_param,
                **times,
                "gb_per_s": one.bytes_per_param / times["ns_per_param"],
                "waited_share": measured.waited_ns / (plan.threads * sum(measured.times)),
                "host_us": min(measured.host_ns) / 1e3 if on_gpu else None,
                "extra_bytes": None if on_gpu else timing.peak_extra_bytes(one.step),
            }
        )
    return [row | _compared(row, rows) for row in rows]


def _compared(row: dict, rows: list[dict]) -> dict:
    """Return a row's speed over the copy of its bytes, and over DeepSpeed's fp32 step."""

    def speed_over(name: str, **kind: object) -> float | None:
        wanted = {"name": name, **kind}.items()
        return next((r["ns_per_param"] / ns for r in rows if wanted <= r.items()), None)

    ns, same = row["ns_per_param"], ("variant", "bytes_per_param")
    return {
        "of_copy": speed_over("copy", **{key: row[key] for key in same}),
        "speed_over_deepspeed_fp32": speed_over("deepspeed", variant="fp32"),
    }
