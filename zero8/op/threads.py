# SPDX-License-Identifier: Apache-2.0
"""How many threads a step takes."""

import os

import torch

NO_LIMIT = 1 << 30


def step_threads() -> int:
    """Return torch's number of threads, at most `host_share`; raises as it does."""
    return min(torch.get_num_threads(), host_share())


def host_share() -> int:
    """Return how many threads this rank may take so that the ranks of a host do not take turns.

    Launchers tell a rank how many it shares the host with (torchrun by LOCAL_WORLD_SIZE,
    DeepSpeed by LOCAL_SIZE).  Without OMP_NUM_THREADS and without binding each of them would take
    all processors.

    Returns:
        This rank's share of the processors, `NO_LIMIT` where something else shares them out.

    Raises:
        ValueError: if LOCAL_WORLD_SIZE or LOCAL_SIZE is not a number.
    """
    if os.environ.get("OMP_NUM_THREADS") or not hasattr(os, "sched_getaffinity"):
        return NO_LIMIT
    processors = len(os.sched_getaffinity(0))
    if processors < len(os.sched_getaffinity(os.getppid())):
        return NO_LIMIT  # bound: these are this rank's own, not what the launcher shares out
    return max(1, processors // max(1, _ranks_of_this_host()))


def _ranks_of_this_host() -> int:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if value := os.environ.get(name):
            if not value.isdecimal():
                raise ValueError(
                    f"{name}: got {value!r}, expected the number of ranks of this host"
                )
            return int(value)
    return 1
