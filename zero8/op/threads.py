# SPDX-License-Identifier: Apache-2.0
"""How many threads a step takes."""

import os

import torch


def step_threads() -> int:
    """Return torch's number of threads, at most this rank's share of the host's processors.

    Launchers tell a rank how many it shares the host with (torchrun by LOCAL_WORLD_SIZE,
    DeepSpeed by LOCAL_SIZE).  Without OMP_NUM_THREADS and without binding each of them would take
    all processors, and they would take turns on them.
    """
    threads = torch.get_num_threads()
    if os.environ.get("OMP_NUM_THREADS") or not hasattr(os, "sched_getaffinity"):
        return threads
    processors = len(os.sched_getaffinity(0))
    if processors < len(os.sched_getaffinity(os.getppid())):
        return threads  # bound: these are this rank's own, not what the launcher shares out
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    return max(1, min(threads, processors // max(1, ranks)))
