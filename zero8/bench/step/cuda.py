# SPDX-License-Identifier: Apache-2.0
"""Measure what a step costs on a GPU: zero8's, those of other optimizers, a copy's.

Checks the kernel's bits against the CPU's first.  Writes OUT (JSON), and a table (.md) and a figure
(.png) beside it, again after each size.
"""

import argparse
import gc
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from zero8.bench import gpu, record
from zero8.bench.step import kernel as step_kernel
from zero8.bench.step.cuda_clock import CudaClock
from zero8.bench.step.cuda_contenders import (
    PEERS,
    Skipped,
    Timeable,
    list_timeables,
    size_name,
    timeables,
)
from zero8.bench.step.cuda_report import markdown
from zero8.bench.step.cuda_targets import checks
from zero8.bench.step.tensors import LEAST_NUMEL, NUM_TENSORS, ROW
from zero8.bench.step.timing import Timed, interleaved, spread, time_by_itself
from zero8.bench.usage import UsageError, check_multiple, check_names, chosen
from zero8.op import cuda
from zero8.spec.codec import CODECS, DEFAULT_CODEC

DEVICE = "cuda"
SIZES = tuple(4**power for power in range(10, 16))
LIST_NUMEL = 2**25
ROUNDS = 30


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    sizes: tuple[int, ...]
    list_numel: int
    codecs: tuple[str, ...]
    against: tuple[str, ...]

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Plan":
        """Return what options ask for; raises UsageError for what cannot be measured."""
        for option in ("threads", "isa"):
            if getattr(arguments, option) is not None:
                raise UsageError(f"--{option}: got it with --device cuda, expected --device cpu")
        if arguments.numel is not None:
            check_multiple("--numel", arguments.numel, ROW, LEAST_NUMEL)
        codecs = tuple(CODECS) if arguments.codec is None else (arguments.codec,)
        against = chosen(arguments.against, PEERS)
        check_names("--codec", codecs, CODECS)
        check_names("--against", against, PEERS)
        numel = arguments.numel
        return cls((numel,) if numel else SIZES, numel or LIST_NUMEL, codecs, against)

    @property
    def list_codec(self) -> str:
        """The codec of the list of tensors."""
        return DEFAULT_CODEC if DEFAULT_CODEC in self.codecs else self.codecs[0]


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the three files, print the targets; return the exit status.

    Raises:
        UsageError: if there is no GPU, or an option is not served.
        RuntimeError: if the kernel's bits are not those of the CPU.
    """
    if (absence := gpu.absence()) is not None:
        raise UsageError(f"--device cuda: {absence}")
    from zero8.bench.step.cuda_figure import plot  # which needs matplotlib

    plan = Plan.of(arguments)
    began = time.perf_counter()
    made = {"machine": gpu.machine(), "command": _command(plan, arguments.json)}
    for measured in measure(plan, torch.device(DEVICE), CudaClock(), cuda.step):
        result = measured | made | {"seconds": time.perf_counter() - began}
        files = record.write(result, arguments.json, markdown, plot)
    record.print_checks(result["checks"])
    record.print_skipped(result["skipped"])
    for error in result["errors"]:
        print(f"FAILED {error}")
    print("wrote", *files)
    return 1 if result["errors"] else 0


def _command(plan: Plan, out: Path) -> str:
    words = ["zero8", "bench", "step", "--device", "cuda", "--json", out]
    words += ["--against", ",".join(plan.against)]
    words += ["--numel", *plan.sizes] if len(plan.sizes) == 1 else []
    words += ["--codec", *plan.codecs] if len(plan.codecs) == 1 else []
    return shlex.join(map(str, words))


def measure(plan: Plan, device: torch.device, clock: CudaClock, step: Callable) -> Iterator[dict]:
    """Yield, after each size, the result so far, all but the machine, the time and the command.

    Args:
        plan: what is measured.
        device: where.
        clock: what times calls.
        step: the kernel's step over a list of segments.

    Raises:
        RuntimeError: if the kernel's bits are not those of the CPU.
    """
    step_kernel.check_on(device, step, plan.codecs)
    skipped, errors, rows = Skipped(), [], []

    def attempt(place: str, part: Callable[[], list[dict]]) -> list[dict]:
        """Return the rows of a part of the measurement, none if it fails."""
        try:
            gc.collect()
            torch.cuda.empty_cache()
            return part()
        except torch.OutOfMemoryError as error:
            skipped.add("all", place, error)
        except RuntimeError as error:  # after some errors of the GPU nothing runs in this process
            errors.append(f"{place}: {error}".splitlines()[0])
        return []

    common = {
        "device": device.type,
        "default": DEFAULT_CODEC,
        "sizes": plan.sizes,
        "repeats": ROUNDS,
        "tensor_list": attempt("list", partial(_listed, plan, device, clock, skipped)),
        "versions": record.versions(),
        "commit": record.commit(),
        "cpu": record.cpu(),
    }
    for numel in plan.sizes:
        part = partial(_rows, plan, numel, device, clock, skipped)
        rows += attempt(size_name(numel), part)
        result = common | {"rows": rows, "skipped": skipped.entries, "errors": errors}
        yield {**result, "checks": checks(result)}


def _timed(steps: Sequence[Timeable], numel: int, clock: CudaClock) -> list[dict]:
    """Return what was measured of steps, which take turns."""
    hosts = [clock.host_ns(one.call) for one in steps]
    calls = [
        partial(clock.device_ns, one.call, host) for one, host in zip(steps, hosts, strict=True)
    ]
    samples = interleaved([Timed(call) for call in calls], ROUNDS, time_by_itself)
    return [
        {
            "name": one.name,
            "variant": one.variant,
            "codec": one.codec,
            "numel": numel,
            "bytes_per_param": one.bytes_per_param,
            **(times := spread(timed.times, numel)),
            "gb_per_s": one.bytes_per_param / times["ns_per_param"],
            "host_us": host / 1e3,
        }
        for one, timed, host in zip(steps, samples, hosts, strict=True)
    ]


def _rows(
    plan: Plan, numel: int, device: torch.device, clock: CudaClock, skipped: Skipped
) -> list[dict]:
    steps = timeables(plan.codecs, plan.against, numel, device, skipped)
    rows = _timed(steps, numel, clock)
    copies = {r["bytes_per_param"]: r["ns_per_param"] for r in rows if r["name"] == "copy"}
    for row in rows:
        row["fraction_of_copy"] = copies[row["bytes_per_param"]] / row["ns_per_param"]
    return rows


def _listed(plan: Plan, device: torch.device, clock: CudaClock, skipped: Skipped) -> list[dict]:
    """Return rows of steps over many tensors, each with its time over that of a single one."""
    pairs = list_timeables(plan.list_codec, plan.against, plan.list_numel, device, skipped)
    rows = _timed([step for pair in pairs for step in pair], plan.list_numel, clock)
    for flat, listed in zip(rows[::2], rows[1::2], strict=True):
        listed["tensors"] = NUM_TENSORS
        listed["ratio"] = listed["ns_per_param"] / flat["ns_per_param"]
    return rows[1::2]
