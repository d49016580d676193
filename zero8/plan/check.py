# SPDX-License-Identifier: Apache-2.0
"""Compare estimated step times with measured ones: `zero8 bench plan`.

Measures the machine as `zero8 plan --measure` does, and in the same rounds times steps of other
sizes and thread counts, which it then estimates.  Writes OUT (JSON), and a table (.md) beside it.
"""

import argparse
import shlex
import time
from functools import partial
from pathlib import Path

import torch

from zero8.bench import record
from zero8.bench.step import contenders
from zero8.bench.step.contenders import Contender
from zero8.bench.step.machines import Machine
from zero8.bench.step.tensors import ROW
from zero8.bench.step.timing import Timed, interleaved, threads
from zero8.bench.step.variants import BF16, FP32
from zero8.bench.usage import check_least, check_multiple
from zero8.plan.measure import Calibration, fastest_ns, thread_counts
from zero8.plan.rates import Rates
from zero8.spec.codec import DEFAULT_CODEC

NUMEL = 2**25
ROUNDS = 15
SIZES = (0.5, 1)
"""Sizes of the estimated steps, relative to the calibration's."""

LIMIT_PERCENT = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the measurement to a parser."""
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="result file")
    parser.add_argument(
        "--numel", type=int, default=NUMEL, help=f"parameters of the calibration, default {NUMEL}"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the files, print the table; return the exit status."""
    check_multiple("--numel", arguments.numel, 2 * ROW, 2 * ROW)
    check_least("--rounds", arguments.rounds, 2)
    began, machine = time.perf_counter(), record.machine()
    words = ["zero8", "bench", "plan", "--json", arguments.json, "--numel", arguments.numel]
    result = measure(arguments.numel, arguments.rounds) | {
        "command": shlex.join(map(str, [*words, "--rounds", arguments.rounds])),
        "seconds": time.perf_counter() - began,
        "cpu": record.cpu(),
        "commit": record.commit(),
        "machine": machine,
        "versions": record.versions(),
    }
    files = record.write(result, arguments.json, markdown)
    print(markdown(result))
    print("wrote", *files)
    return 0


def measure(numel: int, rounds: int) -> dict:
    """Return the machine, its rates, and a row for each step, estimated and timed."""
    counts = thread_counts(torch.get_num_threads())
    calibration = Calibration(numel, counts[-1])
    cases = [(c, n) for size in SIZES for c in _contenders(int(size * numel)) for n in counts]
    timed = [*calibration.timed, *(Timed(partial(_step, c, n)) for c, n in cases)]
    samples = interleaved(timed, rounds)
    split = len(calibration.timed)
    machine, rates, bandwidths = calibration.result([fastest_ns(one) for one in samples[:split]])
    rows = [
        _row(*case, fastest_ns(one), machine, rates)
        for case, one in zip(cases, samples[split:], strict=True)
    ]
    return {
        "rows": rows,
        "gb_per_s": {str(count): value for count, value in bandwidths.items()},
        "rates": vars(rates),
        "rounds": rounds,
        "numel": numel,
    }


def _contenders(numel: int) -> list[Contender]:
    params = contenders.flat_params(numel)
    peers, _ = contenders.peer_contenders(["deepspeed", "torch"], params)
    ours = contenders.zero8_contenders([DEFAULT_CODEC], params)
    return [
        *(peer for peer in peers if peer.variant == FP32.name),
        *(one for one in ours if one.variant in (FP32.name, BF16.name)),
    ]


def _step(contender: Contender, count: int) -> None:
    with threads(count):
        if contender.name == "deepspeed":
            contenders.set_threads(contender.step.__self__)
        contender.step()


def _row(
    contender: Contender, count: int, measured_ns: float, machine: Machine, rates: Rates
) -> dict:
    numel = contender.param.numel()
    fp32_adam, zero8 = rates.of(contender.param.element_size())
    rate = zero8 if contender.codec else fp32_adam
    here = Machine(machine.name, count, machine.gb_per_s)
    estimated_ns = here.ns_per_param(rate, contender.bytes_per_param) * numel
    return {
        "name": contender.name,
        "variant": contender.variant,
        "numel": numel,
        "threads": count,
        "estimated_ms": estimated_ns / 1e6,
        "measured_ms": measured_ns / 1e6,
        "error_percent": 100 * (estimated_ns / measured_ns - 1),
    }


def markdown(result: dict) -> str:
    """Return the tables of a result."""
    rows = result["rows"]
    within = sum(abs(row["error_percent"]) <= LIMIT_PERCENT for row in rows)
    cells = [
        [
            f"{row['name']} {row['variant']}",
            f"{row['numel']:,}",
            str(row["threads"]),
            f"{row['estimated_ms']:.1f}",
            f"{row['measured_ms']:.1f}",
            f"{row['error_percent']:+.1f}",
        ]
        for row in rows
    ]
    headers = ["step", "parameters", "threads", "estimated ms", "measured ms", "error %"]
    bandwidths = ", ".join(f"{n} thread(s) {v:.1f}" for n, v in result["gb_per_s"].items())
    rates = result["rates"]
    load = result["machine"]["load_average"]
    lines = [
        "# Step times that `zero8 plan` estimates, and measured ones",
        "",
        f"`{result['command']}`, {result['seconds']:.0f} s, commit {result['commit']}; "
        f"{result['cpu']}, {result['machine']['cores']} cores; load average before it {load:.2f}; "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        + ".",
        "",
        f"Measured of the machine, over {result['numel']:,} parameters, fastest "
        f"of {result['rounds']} rounds in which all calls take turns: "
        f"a copy moves {bandwidths} GB/s; one thread takes {rates['fp32_adam']:.3f} ns/param for "
        f"PyTorch's fused fp32 AdamW, {rates['zero8']:.3f} for zero8 and "
        f"{rates['zero8_bf16']:.3f} for zero8 on bf16 weights.",
        "",
        *record.table_lines(headers, cells),
        "",
        f"{within} of {len(rows)} estimates are within {LIMIT_PERCENT:.0f} % of the measured time; "
        f"the largest error is {max(abs(row['error_percent']) for row in rows):.1f} %.",
    ]
    return "\n".join(lines) + "\n"
