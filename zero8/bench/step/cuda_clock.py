# SPDX-License-Identifier: Apache-2.0
"""Times what a GPU does, apart from how long the host takes to ask for it."""

import time
from collections.abc import Callable

import torch

HOST_CALLS = 5

# No GPU runs faster than 2.5 GHz: it waits at least 1.6 times as long as the host was seen to take.
CYCLES_PER_NS = 4


class CudaClock:
    """Times calls that the host does not wait for."""

    def host_ns(self, call: Callable[[], object]) -> int:
        """Return how long a call keeps the host, with nothing queued: the least of some times."""
        times = []
        for _ in range(HOST_CALLS):
            torch.cuda.synchronize()
            began = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - began)
        torch.cuda.synchronize()
        return min(times)

    def device_ns(self, call: Callable[[], object], host_ns: int) -> float:
        """Return how long the GPU works on a call that keeps the host for `host_ns`.

        The GPU is kept waiting until the host has asked for everything, as it is in training, where
        the queue is long.  A call that waits for the GPU by itself has that wait counted.
        """
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES_PER_NS * host_ns)
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return 1e6 * began.elapsed_time(ended)
