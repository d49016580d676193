# SPDX-License-Identifier: Apache-2.0
"""Measure times and memory of steps on a CPU or a GPU: zero8's, other optimizers', and a copy's.

Checks the kernel's bits first.  Times one algorithm after the other, the steps of each in turns.
Writes OUT (JSON), and a table (.md) and a figure (.png) beside it.
"""

import argparse
import os
import re
import resource
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from zero8.bench import gpu, record
from zero8.bench.step import contenders as step_contenders
from zero8.bench.step import kernel as step_kernel
from zero8.bench.step import machines
from zero8.bench.step.algorithms import ZERO8
from zero8.bench.step.contenders import Contender, Params
from zero8.bench.step.devices import CPU, DEVICES, GPU, Device
from zero8.bench.step.report import busy_lines, markdown
from zero8.bench.step.targets import checks
from zero8.bench.step.tensors import LEAST_NUMEL, NUM_TENSORS, ROW
from zero8.bench.step.timing import Samples, interleaved, spread, threads
from zero8.bench.step.variants import FP32
from zero8.bench.usage import UsageError, check_least, check_multiple, check_names, chosen
from zero8.op import kernel
from zero8.spec.codec import CODECS, DEFAULT_CODEC

ROUNDS = 30


@dataclass(frozen=True)
class Plan:
    """A measurement; `isa` None means the fastest one, and all of them in the cache."""

    device: Device
    numel: int
    threads: int
    algorithms: tuple[str, ...]
    codecs: tuple[str, ...]
    isa: str | None
    against: tuple[str, ...]

    def __post_init__(self):
        """Raise UsageError for invalid values."""
        check_multiple("--numel", self.numel, ROW, LEAST_NUMEL)
        check_least("--threads", self.threads, 1)
        check_names("--algorithm", self.algorithms, ZERO8)
        check_names("--codec", self.codecs, CODECS)
        check_names("--isa", () if self.isa is None else (self.isa,), kernel.isas())
        check_names("--against", self.against, step_contenders.peers_on(self.device))

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Plan":
        """Return the plan of the options; raises as the constructor does."""
        device = DEVICES[arguments.device]
        for option in ("threads", "isa") if device.name == "cuda" else ():
            if getattr(arguments, option) is not None:
                raise UsageError(f"--{option}: got --device cuda, expected --device cpu")
        return cls(
            device=device,
            numel=device.numel if arguments.numel is None else arguments.numel,
            threads=torch.get_num_threads() if arguments.threads is None else arguments.threads,
            algorithms=chosen(arguments.algorithm, ZERO8),
            codecs=tuple(CODECS) if arguments.codec is None else (arguments.codec,),
            isa=arguments.isa,
            against=chosen(arguments.against, step_contenders.peers_on(device)),
        )

    @property
    def list_codec(self) -> str:
        """The codec of the list of tensors."""
        return DEFAULT_CODEC if DEFAULT_CODEC in self.codecs else self.codecs[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the measurement to a parser."""
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="result file")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="default cpu")
    sizes = f"default {CPU.numel}; {GPU.numel} on a GPU"
    parser.add_argument("--numel", type=int, help=f"parameters, {sizes}")
    parser.add_argument("--threads", type=int, help="threads on the CPU, default all")
    parser.add_argument("--algorithm", metavar="NAME,...", help=f"default {','.join(ZERO8)}")
    parser.add_argument("--codec", help="one of zero8's codecs, default all")
    parser.add_argument("--isa", help="zero8's instruction set on the CPU, default the fastest")
    names, on_gpu = (",".join(step_contenders.peers_on(device)) for device in (CPU, GPU))
    parser.add_argument("--against", metavar="NAME,...", help=f"default {names}; {on_gpu} on a GPU")


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the three files, print the targets; return the exit status.

    Raises:
        UsageError: if there is no such device, or an option is invalid.
        RuntimeError: if the kernel's bits are not as expected.
    """
    if arguments.device == "cuda" and (absence := gpu.absence()) is not None:
        raise UsageError(f"--device cuda: {absence}")
    from zero8.bench.step.figure import plot  # needs matplotlib

    plan = Plan.of(arguments)
    began = time.perf_counter()
    result = measure(plan)
    result |= {"seconds": time.perf_counter() - began, "command": _command(plan, arguments.json)}
    files = record.write(result, arguments.json, markdown, plot)
    record.print_checks(result["checks"])
    record.print_skipped(result["skipped"])
    for line in busy_lines(result):
        print(line)
    print("wrote", *files)
    return 0


def _command(plan: Plan, out: Path) -> str:
    words = ["zero8", "bench", "step", "--json", out, "--numel", plan.numel]
    on_gpu = plan.device.name == "cuda"
    words += ["--device", "cuda"] if on_gpu else ["--threads", plan.threads]
    words += ["--algorithm", ",".join(plan.algorithms), "--against", ",".join(plan.against)]
    words += ["--codec", *plan.codecs] if len(plan.codecs) == 1 else []
    words += ["--isa", plan.isa] if plan.isa else []
    return shlex.join(map(str, words))


def measure(plan: Plan) -> dict:
    """Return the result of a plan, without its duration and the command.

    Raises:
        RuntimeError: if the kernel's bits are not as expected.
    """
    with threads(plan.threads), _isa(plan.isa):
        isas = [plan.isa] if plan.isa else list(kernel.isas())
        plan.device.check(plan.algorithms, plan.codecs, isas, plan.threads)
        machine = _machine()  # before the measurement loads it
        if plan.device.name == "cuda":
            machine |= {"gpu": gpu.machine()}
            isas = []
        in_cache = step_kernel.time_in_cache(plan.algorithms, plan.codecs, isas)
        timed, huge_bytes = _time_out_of_cache(plan)
        result = {
            "default": DEFAULT_CODEC,
            "algorithms": plan.algorithms,
            "numel": plan.numel,
            "threads": plan.threads,
            "repeats": ROUNDS,
            **timed,
            "in_cache": in_cache,
            "versions": record.versions(),
            "commit": record.commit(),
            "cpu": record.cpu(),
            "machine": machine | {"anonymous_huge_bytes": huge_bytes},
        }
    return {**result, "on_machines": machines.rows(result), "checks": checks(result)}


@contextmanager
def _isa(name: str | None) -> Iterator[None]:
    before = os.environ.get("ZERO8_ISA", "")
    os.environ["ZERO8_ISA"] = name or before
    try:
        yield
    finally:
        os.environ["ZERO8_ISA"] = before


class Timings(NamedTuple):
    """The rows of one algorithm, its skipped peers, and the bytes in huge pages meanwhile."""

    rows: list[dict]
    skipped: list[dict]
    huge_bytes: int | None


def _time_out_of_cache(plan: Plan) -> tuple[dict, int | None]:
    """Return the rows, the tensor list's time and skipped peers; and the bytes in huge pages."""
    params = step_contenders.flat_params(plan.numel, plan.device)
    timings = [_time_algorithm(algorithm, plan, params) for algorithm in plan.algorithms]
    skipped: list[dict] = []
    for one in timings:
        skipped += (entry for entry in one.skipped if entry not in skipped)
    result = {
        "rows": [row for one in timings for row in one.rows],
        "tensor_list": _time_tensor_list(plan, params),
        "skipped": skipped,
    }
    return result, timings[0].huge_bytes


def _time_algorithm(algorithm: str, plan: Plan, params: Params) -> Timings:
    ours = step_contenders.zero8_contenders(plan.codecs, params, algorithm)
    peers, skipped = step_contenders.peer_contenders(plan.against, params, algorithm)
    ceilings = step_contenders.copies([*ours, *peers], plan.device)
    contenders = [*ours, *peers, *ceilings.values()]
    samples = interleaved([c.timed for c in contenders], ROUNDS, plan.device.time_call)
    rows = [
        {"algorithm": algorithm, **_row(*pair, plan)}
        for pair in zip(contenders, samples, strict=True)
    ]
    _compare(rows, [rows[contenders.index(ceilings[c.streams])] for c in contenders])
    return Timings(rows, skipped, _anonymous_huge_bytes())


def _time_tensor_list(plan: Plan, params: Params) -> dict:
    """Return the time of the first algorithm's step over many tensors, beside that over one."""
    algorithm, codec = plan.algorithms[0], plan.list_codec
    ours = step_contenders.zero8_contenders([codec], params, algorithm)
    calls = [
        next(one.timed for one in ours if one.variant == FP32.name),
        step_contenders.list_step(codec, plan.numel, plan.device, algorithm),
    ]
    flat, listed = (
        spread(samples.times, plan.numel)
        for samples in interleaved(calls, ROUNDS, plan.device.time_call)
    )
    return {
        "algorithm": algorithm,
        "codec": codec,
        "tensors": NUM_TENSORS,
        "numel": plan.numel,
        **listed,
        "ratio": listed["ns_per_param"] / flat["ns_per_param"],
    }


def _row(contender: Contender, samples: Samples, plan: Plan) -> dict:
    numel = contender.param.numel()
    times = spread(samples.times, numel)
    row = {
        "name": contender.name,
        "variant": contender.variant,
        "codec": contender.codec,
        "isa": plan.device.isa() if contender.codec else None,
        "threads": plan.threads,
        "numel": numel,
        "repeats": len(samples.times),
        "waited_share": samples.waited_ns / (plan.threads * sum(samples.times)),
        "bytes_per_param": contender.bytes_per_param,
        **times,
        "gb_per_s": contender.bytes_per_param / times["ns_per_param"],
        "extra_bytes": plan.device.extra_bytes(contender.step),
    }
    return row | {"host_us": min(samples.host_ns) / 1e3} if samples.host_ns else row


def _compare(rows: list[dict], ceilings: list[dict]) -> None:
    """Add to each row its ratios to its ceiling and to DeepSpeed's fp32 step."""
    times = {(row["name"], row["variant"]): row["ns_per_param"] for row in rows}
    deepspeed = times.get(("deepspeed", FP32.name))
    for row, ceiling in zip(rows, ceilings, strict=True):
        ns = row["ns_per_param"]
        row["ceiling"] = ceiling["variant"]
        row["fraction_of_stream"] = ceiling["ns_per_param"] / ns
        row["ratio_vs_deepspeed_fp32"] = deepspeed / ns if deepspeed else None


def _machine() -> dict:
    """Describe the machine, with caches and huge pages."""
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        **record.machine(),
        "last_level_cache_bytes": _last_level_cache_bytes(),
        "page_bytes": resource.getpagesize(),
        "transparent_huge_pages": huge.read_text().strip() if huge.is_file() else None,
    }


def _last_level_cache_bytes() -> int | None:
    levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    size = levels[-1].read_text().strip() if levels else ""
    return 1024 * int(size[:-1]) if size.endswith("K") else None


def _anonymous_huge_bytes() -> int | None:
    """Return the bytes of this process's memory in huge pages."""
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.is_file():
        return None
    return 1024 * int(re.search(r"AnonHugePages:\s*(\d+) kB", rollup.read_text())[1])
