# SPDX-License-Identifier: Apache-2.0
"""How calls are timed against each other, and how much memory they take while they run."""

import ctypes
import gc
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

WARM_UP_ROUNDS = 3
# No GPU runs faster than 2.5 GHz: it waits at least 1.6 times as long as the host was seen to take.
CYCLES_PER_NS = 4


@dataclass(frozen=True)
class Timed:
    """What is timed: a call, in every round or in every `every`-th one."""

    call: Callable[[], object]
    every: int = 1


@dataclass
class Samples:
    """What was measured of one call.

    Attributes:
        times: times in ns: of the wall, or of the GPU's work.
        waited_ns: how long threads of ours were ready to run but had no core, in all calls.
        host_ns: how long calls kept the host that it did not wait for.
    """

    times: list[float] = field(default_factory=list)
    waited_ns: int = 0
    host_ns: list[int] = field(default_factory=list)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Give torch this many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def time_by_the_wall(call: Callable[[], object], samples: Samples) -> None:
    """Add the wall time of a call."""
    waited_ns = _waited_ns()
    began = time.perf_counter_ns()
    call()
    samples.times.append(time.perf_counter_ns() - began)
    samples.waited_ns += _waited_ns() - waited_ns


def time_on_gpu(call: Callable[[], object], samples: Samples) -> None:
    """Add how long a GPU works on a call, and how long the call keeps the host.

    The GPU is kept waiting until the host has asked for everything, as it is in training, where the
    queue is long.  A call that waits for the GPU by itself has that wait counted.
    """
    torch.cuda.synchronize()
    asked = time.perf_counter_ns()
    call()
    host_ns = time.perf_counter_ns() - asked
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES_PER_NS * host_ns)
    began.record()
    call()
    ended.record()
    ended.synchronize()
    samples.times.append(1e6 * began.elapsed_time(ended))
    samples.host_ns.append(host_ns)


def interleaved(
    timed: Sequence[Timed],
    rounds: int,
    time_call: Callable[[Callable[[], object], Samples], None] = time_by_the_wall,
) -> list[Samples]:
    """Time all calls, which take turns in one process.

    The speed of a shared machine's memory drifts by tens of percent within minutes: calls of the
    same rounds meet the same machine.  Every round has an order of its own, so that no call always
    finds what the same other one has left in the cache.
    """
    samples = [Samples() for _ in timed]
    order, shuffle = list(range(len(timed))), random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for number in tqdm(range(-WARM_UP_ROUNDS, rounds), desc="step", unit="round"):
            shuffle(order)
            for k in order:
                if number % timed[k].every == 0:
                    time_call(timed[k].call, samples[k] if number >= 0 else Samples())
    finally:
        gc.enable()
    return samples


def _waited_ns() -> int:
    """Return how long threads of this process have waited for a core so far; 0 if nobody counts."""
    # The second number of three: Linux, Documentation/scheduler/sched-stats.rst.
    stats = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(stat.read_text().split()[1]) for stat in stats)


def spread(times: Sequence[float], numel: int) -> dict[str, float]:
    """Return median, smallest, and 10th and 90th percentile of times, in ns per element."""
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    values = {
        "ns_per_param": statistics.median(times),
        "ns_per_param_min": min(times),
        "ns_per_param_p10": tenths[0],
        "ns_per_param_p90": tenths[-1],
    }
    return {name: value / numel for name, value in values.items()}


def peak_extra_bytes(call: Callable[[], object]) -> int | None:
    """Return by how much resident memory rises above what it was while a call runs.

    None where the system does not count it.  Linux counts in steps of up to 64 pages a processor.
    """
    try:
        # What the allocator keeps from earlier calls must not hide what this one takes.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = _status_bytes("VmRSS")
        call()
        return max(0, _status_bytes("VmHWM") - before)
    except (OSError, AttributeError):
        return None


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)[1])
