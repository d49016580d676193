# SPDX-License-Identifier: Apache-2.0
"""Measure the steps of engines in turns: Adam8bitBlockwise, and DeepSpeed's AdamW or torch's.

With --algorithm muon: Muon8bitBlockwise and DeepSpeed's Muon.

Under ZeRO that is `engine.step()`, under FSDP2 clipping and the optimizer's step.

Writes OUT (JSON), and a table (.md) beside it.  Under a launcher, such as
torchrun, all ranks measure and rank 0 writes.
"""

import argparse
import logging
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch

from benchmarks import record
from benchmarks.engine.clocked import Clocked
from benchmarks.engine.engines import CONTENDERS, DISK, ENGINES, SIDES, Case, join_ranks
from zero8.bench import in_turns, multiple, spread, threads
from zero8.environment import ranks
from zero8.op import kernel
from zero8.spec.adam import ADAM
from zero8.spec.muon import MUON

MODULE = "benchmarks.engine"
CLIPPING = ("1.0", "0.0")
COLUMNS = {
    "engine, clipping, optimizer": ("label", record.TEXT),
    "the engine's step, ms": ("phase_ms", "{:.1f}"),
    "10 %": ("phase_ms_p10", "{:.1f}"),
    "90 %": ("phase_ms_p90", "{:.1f}"),
    "optimizer's step, ms": ("inner_ms", "{:.1f}"),
    "sent, bytes/param": ("sent_bytes", "{:.3f}"),
    "times as fast": ("ratio", "{:.2f}"),
}
REMARKS = {
    ADAM.name: (
        "Under ZeRO, bf16 masters are compared with DeepSpeed's bf16 masters and states, all "
        "others with its fp32 masters; under FSDP2, whose parameters are float32, with torch's "
        "fused AdamW. zero8 clips by `optimizer.clip_grad_norm_` under FSDP2."
    ),
    MUON.name: (
        "All are compared with DeepSpeed's Muon, which orthogonalizes before its optimizer's step: "
        "in float16 where the processor has it, and else in float32. zero8's does it in the step: "
        "in bfloat16 where the processor multiplies it fast, and else in float32, as the row "
        "*float32* does everywhere."
    ),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = record.parser(MODULE, __doc__)
    made.add_argument("--algorithm", choices=CONTENDERS, default=ADAM.name, help="default adam")
    for name, default, help_text in (
        ("numel", 2**26, "parameters, default 2^26"),
        ("rounds", 10, "measured steps, default 10"),
        ("threads", torch.get_num_threads(), "of torch in each rank, default all"),
    ):
        number = partial(multiple, 1)
        made.add_argument(f"--{name}", type=number, default=default, metavar="N", help=help_text)
    in_memory = tuple(one for one in ENGINES if one != DISK)
    for name, valid, default in (
        ("engines", ENGINES, in_memory),  # DeepSpeed's AdamW needs libaio for a disk
        ("clipping", CLIPPING, CLIPPING),
    ):
        settings = {"type": record.names_of(valid), "default": default, "metavar": "NAME,..."}
        made.add_argument(f"--{name}", **settings, help=f"some of {','.join(valid)}")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write both files, print the table; return the exit status."""
    made = parser()
    asked = made.parse_args(argv)
    unit, engines = SIDES[asked.algorithm] ** 2, CONTENDERS[asked.algorithm]
    if asked.numel % unit:
        made.error(f"--numel: got {asked.numel}, expected a multiple of {unit}")
    cases = [
        Case(engine, float(limit), asked.numel, asked.algorithm)
        for engine, limit in product(asked.engines, asked.clipping)
        if engine in engines
    ]
    if not cases:
        made.error(f"--engines: got {asked.engines}, expected some of {list(engines)}")
    join_ranks()
    environment = record.environment(MODULE)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with threads(asked.threads):
        rows = [row for case in cases for row in measure(case, asked.rounds)]
    if ranks.rank() != 0:
        return 0
    world_size = ranks.num_ranks()
    if world_size > 1:
        start = f"torchrun --nproc-per-node {world_size}"
        environment["command"] = environment["command"].replace("python", start, 1)
    result = environment | {
        **{name: getattr(asked, name) for name in ("algorithm", "numel", "rounds", "threads")},
        "world_size": world_size,
        "isa": kernel.default_isa(),
        "rows": rows,
    }
    sizes = f"{asked.numel:,} parameters, {asked.threads} threads, {kernel.default_isa()}"
    record.write(result, asked.json, markdown, f"Whole engines, {asked.algorithm}, {sizes}")
    print(*markdown(result), sep="\n")
    return 0


def measure(case: Case, rounds: int) -> list[dict]:
    """Return a row per contender; all step in turns."""
    print(f"{case.engine} ...", file=sys.stderr, flush=True)
    clocks = {one: Clocked(one.make(case)) for one in CONTENDERS[case.algorithm][case.engine]}
    times = in_turns([clock.step for clock in clocks.values()], rounds)
    sent = [clock.sent_bytes() for clock in clocks.values()]
    for clock in clocks.values():
        clock.close()
    phases = {one.name: [ms for ms, _ in pairs] for one, pairs in zip(clocks, times, strict=True)}
    rows = []
    for one, pairs, num_bytes in zip(clocks, times, sent, strict=True):
        mine = phases[one.name]
        phase_ms, first, last = spread(mine)
        # Of the same rounds, as the speed of memory drifts.
        ratios = (base / own for base, own in zip(phases[one.over], mine, strict=True))
        rows.append(
            {
                "engine": case.engine,
                "clipping": case.clipping,
                "name": one.name,
                "phase_ms": phase_ms,
                "phase_ms_p10": first,
                "phase_ms_p90": last,
                "inner_ms": statistics.median(ms for _, ms in pairs),
                "sent_bytes": num_bytes / case.numel,
                "over": one.over,
                "ratio": statistics.median(ratios),
            }
        )
    return rows


def markdown(result: dict) -> list[str]:
    """Return the lines of a result's table."""
    side = SIDES[result["algorithm"]]
    return [
        *record.table_of([row | {"label": _label(row)} for row in result["rows"]], COLUMNS),
        "",
        f"A bf16 model of matrices of {side} x {side} on {result['world_size']} rank(s), its "
        "optimizer in host memory, or on a disk; rank 0's times. Medians of "
        f"{result['rounds']} steps; the engines of one kind step in turns in one process, and a "
        f"ratio is the median over the rounds. {REMARKS[result['algorithm']]} The engine's step is "
        "everything from the last gradient to the next forward: `engine.step()`, or clipping and "
        "the optimizer's step. Sent are the bytes of rank 0 in a step, counted "
        "(`benchmarks/engine/clocked.py`).",
    ]


def _label(row: dict) -> str:
    clipping = f"clipped at {row['clipping']:g}" if row["clipping"] else "not clipped"
    return f"{row['engine']}, {clipping}, {row['name']}"


if __name__ == "__main__":
    sys.exit(main())
