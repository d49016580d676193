# SPDX-License-Identifier: Apache-2.0
"""Time a step of this machine: zero8's, DeepSpeed's CPUAdam, torch's AdamW, and a copy.

The steps take turns in one process.  A copy reads and writes as many bytes as the step before it in
the table.
"""

import argparse
import ctypes
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from tabulate import tabulate
from torch.optim import Optimizer

from zero8.op import kernel
from zero8.optimizer.elementwise import Adam8bitBlockwise

T = TypeVar("T")
HYPER = {"lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
COLUMNS = 4096
NUMEL = 2**25
ROUNDS = 20
WARM_UP_ROUNDS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Contender(NamedTuple):
    """A step to time over one parameter, whose weights are of a dtype in `DTYPES`.

    It reads and writes `moved_bytes`: the gradient once, the weights and moments twice; scales of
    blocks do not count.
    """

    name: str
    dtype: str
    step: Callable[[], object]
    moved_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    help_text = f"parameters, a multiple of {COLUMNS}; default {NUMEL}"
    numel = partial(multiple, COLUMNS)
    parser.add_argument("--numel", type=numel, default=NUMEL, metavar="N", help=help_text)
    parser.add_argument("--threads", type=partial(multiple, 1), metavar="N", help="default all")


def multiple(unit: int, word: str) -> int:
    """Return the value of an option that is a positive multiple of a unit."""
    if (value := int(word)) < 1 or value % unit:
        raise argparse.ArgumentTypeError(f"got {word}, expected a positive multiple of {unit}")
    return value


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status, JSON object and text; times are median, 10th and 90th percentile."""
    numel, load_average = arguments.numel, os.getloadavg()[0]
    with threads(arguments.threads or torch.get_num_threads()):
        contenders, missing = _contenders(numel)
        times_ns = in_turns([partial(wall_ns, one.step) for one in contenders], ROUNDS)
        result = {
            "numel": numel,
            "load_average": load_average,
            "threads": torch.get_num_threads(),
            "isa": kernel.default_isa(),
            "rows": [],
            "missing": missing,
        }
    for one, times in zip(contenders, times_ns, strict=True):
        median, low, high = (time_ns / numel for time_ns in spread(times))
        row = {"name": one.name, "dtype": one.dtype, "ns_per_param": median}
        row |= {"ns_per_param_p10": low, "ns_per_param_p90": high}
        result["rows"].append({**row, "gb_per_s": one.moved_bytes / numel / median})
    return 0, result, _text(result)


def in_turns(calls: Sequence[Callable[[], T]], rounds: int) -> list[list[T]]:
    """Return what each call returned in each round, after some rounds that do not count.

    The speed of a shared machine's memory drifts: calls of the same round meet the same conditions.
    Their order is new in each, so that no call always finds the cache as the same other left it.
    """
    found: list[list[T]] = [[] for _ in calls]
    order, shuffle = list(range(len(calls))), random.Random(0).shuffle
    for number in range(-WARM_UP_ROUNDS, rounds):
        shuffle(order)
        for place in order:
            value = calls[place]()
            if number >= 0:
                found[place].append(value)
    return found


def wall_ns(call: Callable[[], object]) -> int:
    """Return the wall time of a call."""
    began = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - began


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, and 10th and 90th percentile."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return statistics.median(values), tenths[0], tenths[-1]


def copy(num_bytes: int, device: torch.device | str = "cpu") -> Callable[[], object]:
    """Return a copy that reads half of so many bytes, and writes the other half."""
    source, target = torch.ones(2, num_bytes // 2, dtype=torch.uint8, device=device)
    return partial(target.copy_, source)


def _deepspeed(params: list[torch.nn.Parameter], **hyper: object) -> Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam(params, fp32_optimizer_states=False, **hyper)
    set_threads(optimizer)
    return optimizer


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "zero8": Adam8bitBlockwise,
    "DeepSpeedCPUAdam": _deepspeed,
    "torch AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "torch AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
}


def _contenders(numel: int) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders, and why others are missing."""
    found, missing = [], {}
    for dtype in DTYPES:
        param = torch.nn.Parameter(_random(numel, dtype, 1.0))
        param.grad = _random(numel, dtype, 1e-3)
        for name, make in OPTIMIZERS.items():
            is_ours = name == "zero8"
            try:
                optimizer = make([param], **HYPER)
                optimizer.step()  # makes the moments
            except (ImportError, RuntimeError, OSError) as error:  # not installed, or not compiled
                if is_ours:
                    raise
                missing[name] = reason_of(error)
                continue
            moments_bytes = 2 * (1 if is_ours else param.element_size())
            moved_bytes = (3 * param.element_size() + 2 * moments_bytes) * numel
            found.append(Contender(name, dtype, optimizer.step, moved_bytes))
            if is_ours:
                moved = copy(moved_bytes)
                found.append(Contender("copy of zero8's bytes", dtype, moved, moved_bytes))
    return found, missing


def _random(numel: int, dtype: str, scale: float) -> torch.Tensor:
    return torch.randn(numel // COLUMNS, COLUMNS).mul_(scale).to(DTYPES[dtype])


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Give torch this many threads during the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def set_threads(optimizer: Optimizer) -> None:
    """Give an optimizer of DeepSpeed as many threads as torch, in the OpenMP it is linked to."""
    (op,) = (value for name, value in vars(optimizer).items() if name.startswith("ds_opt_"))
    ctypes.CDLL(op.__file__).omp_set_num_threads(torch.get_num_threads())


def reason_of(error: Exception) -> str:
    """Return in one line why an optimizer cannot step here."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _text(result: dict) -> str:
    ours = {row["dtype"]: row["ns_per_param"] for row in result["rows"] if row["name"] == "zero8"}
    cells = [
        [
            f"{row['name']}, {row['dtype']}",
            f"{row['ns_per_param'] * result['numel'] / 1e6:.1f}",
            f"{row['ns_per_param']:.3f}",
            f"{row['ns_per_param_p10']:.3f} to {row['ns_per_param_p90']:.3f}",
            f"{row['gb_per_s']:.1f}",
            f"{row['ns_per_param'] / ours[row['dtype']]:.2f}",
        ]
        for row in result["rows"]
    ]
    headers = ["step", "ms", "ns/param", "10 to 90 %", "GB/s", "over zero8's time"]
    align = ["left", *["right"] * (len(headers) - 1)]
    lines = [
        f"{result['numel']:,} parameters, {result['threads']} thread(s), {result['isa']}, load "
        f"average before {result['load_average']:.2f}",
        "",
        tabulate(cells, headers, disable_numparse=True, colalign=align),
        *(f"without {name}: {reason}" for name, reason in result["missing"].items()),
    ]
    return "\n".join(lines)
