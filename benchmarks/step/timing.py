# SPDX-License-Identifier: Apache-2.0
"""The times of a call, on a CPU or a GPU."""

import time
from collections.abc import Callable

import torch

from zero8.bench import wall_ns

# For a GPU of up to 2.5 GHz this is a wait of at least 1.6 times the host's time.
CYCLES_PER_NS = 4


def cpu_ns(call: Callable[[], object]) -> tuple[int, int]:
    """Return the wall time of a call twice, for the host does it all."""
    return (taken_ns := wall_ns(call)), taken_ns


def gpu_ns(call: Callable[[], object]) -> tuple[float, int]:
    """Return the GPU's time of a call, and the host's without waiting for it.

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
    return 1e6 * began.elapsed_time(ended), host_ns
