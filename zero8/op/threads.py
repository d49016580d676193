# SPDX-License-Identifier: Apache-2.0
"""The number of threads of a step."""

import logging
import os
from functools import cache

import torch

NO_LIMIT = 1 << 30

logger = logging.getLogger("zero8")

_process: int | None = None
"""The process whose kernels have run with several threads: this one, or one that it forked from."""


def step_threads() -> int:
    """Return torch's number of threads, at most `host_share`, which may raise ValueError."""
    return min(torch.get_num_threads(), host_share())


def host_share() -> int:
    """Return how many threads this rank may use so that the ranks of a host do not compete.

    It is `NO_LIMIT` with OMP_NUM_THREADS, and where the rank is bound to processors of its own.
    """
    if os.environ.get("OMP_NUM_THREADS") or not hasattr(os, "sched_getaffinity"):
        return NO_LIMIT
    processors = len(os.sched_getaffinity(0))
    if processors < len(os.sched_getaffinity(os.getppid())):
        return NO_LIMIT  # bound: these processors are this rank's own
    return max(1, processors // max(1, _ranks_of_this_host()))


def alive(num_threads: int | None = None) -> int:
    """Return how many of these threads, or of `step_threads`, work now: all, or 1 after a fork.

    OpenMP keeps the threads of one kernel for the next.  They do not survive a fork, and a kernel
    in the child would wait for them forever.  The bits of a step do not depend on the number.
    """
    global _process
    number = step_threads() if num_threads is None else num_threads
    if number > 1 and _process not in (None, os.getpid()):
        _warn(os.getpid())
        return 1
    _process = os.getpid() if number > 1 else _process
    return number


@cache
def _warn(process: int) -> None:
    logger.warning(
        "zero8: process %d was forked from one that had taken steps, and steps in one thread; "
        "start training processes with the method 'spawn' to use more",
        process,
    )


def _ranks_of_this_host() -> int:
    # Set by torchrun and by DeepSpeed.
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if value := os.environ.get(name):
            if not value.isdecimal():
                raise ValueError(
                    f"{name}: got {value!r}, expected the number of ranks of this host"
                )
            return int(value)
    return 1
