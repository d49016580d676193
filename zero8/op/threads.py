# SPDX-License-Identifier: Apache-2.0
"""How many threads a step takes."""

import os

import torch


def step_threads() -> int:
    """Return torch's number of threads, at most this rank's share of the host's processors.

    Launchers tell a rank how many it shares the host with (torchrun by LOCAL_WORLD_SIZE,
    DeepSpeed by LOCAL_SIZE).  Without OMP_NUM_THREADS and without binding each of them would take
    all processors, and they would take turns on them.

    Raises:
        ValueError: if LOCAL_WORLD_SIZE or LOCAL_SIZE is not a number.
    """
    threads = torch.get_num_threads()
    if os.environ.get("OMP_NUM_THREADS") or not hasattr(os, "sched_getaffinity"):
        return threads
    processors = len(os.sched_getaffinity(0))
    if processors < len(os.sched_getaffinity(os.getppid())):
        return threads  # bound: these are this rank's own, not what the launcher shares out
    return max(1, min(threads, processors // max(1, _ranks_of_this_host())))


def _ranks_of_this_host() -> int:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if value := os.environ.get(name):
            if not value.isdecimal():
                raise ValueError(
                    f"{name}: got {value!r}, expected the number of ranks of this host"
                )
            return int(value)
    return 1
