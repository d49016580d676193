# SPDX-License-Identifier: Apache-2.0
"""Times calls in turns, and measures the memory that they need."""

import ctypes
import gc
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

WARM_UP_ROUNDS = 3
# For a GPU of up to 2.5 GHz this is a wait of at least 1.6 times the host's time.
CYCLES_PER_NS = 4


@dataclass(frozen=True)
class Timed:
    """A call to time, in every `every`-th round."""

    call: Callable[[], object]
    every: int = 1


@dataclass
class Samples:
    """The measurements of one call.

    Attributes:
        times: wall times, or the GPU's times, in ns.
        waited_ns: time that our threads were ready to run but had no core, over all calls.
        host_ns: the host's times of calls on a GPU, without waiting for it.
    """

    times: list[float] = field(default_factory=list)
    waited_ns: int = 0
    host_ns: list[int] = field(default_factory=list)


def time_by_the_wall(call: Callable[[], object], samples: Samples) -> None:
    """Add the wall time of a call."""
    waited_ns = _waited_ns()
    began = time.perf_counter_ns()
    call()
    samples.times.append(time.perf_counter_ns() - began)
    samples.waited_ns += _waited_ns() - waited_ns


def time_on_gpu(call: Callable[[], object], samples: Samples) -> None:
    """Add the GPU's time of a call, and the host's.

    The GPU sleeps until the host has launched everything, as if behind the long queue of a
    training.  If a call waits for the GPU itself, that wait is included.
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
    """Time all calls in turns, in one process.

    The speed of a shared machine's memory drifts by tens of percent within minutes; calls of the
    same round meet the same conditions.  Each round has a random order, so that no call always
    follows the same other one and its contents of the cache.
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
    """Return the time that this process's threads have waited for a core; 0 if unknown."""
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
    """Return the rise of resident memory during a call, None if the system does not count it.

    Linux counts in steps of up to 64 pages per processor.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory kept from earlier calls would hide this one's
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status_bytes("VmRSS")
        call()
        return max(0, _status_bytes("VmHWM") - before)
    except (OSError, AttributeError):
        return None


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)[1])
