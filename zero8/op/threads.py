# SPDX-License-Identifier: Apache-2.0
"""The number of threads of a step."""

import logging
import os
from functools import cache

import torch

NO_LIMIT = 1 << 30

logger = logging.getLogger("zero8")

# Whether a kernel has run with several threads: in this process, in an ancestor before a fork.
_has_threads = _had_threads = False


def step_threads() -> int:
    """Return torch's number of threads, at most `host_share`, which may raise ValueError."""
    return min(torch.get_num_threads(), host_share())


def host_share() -> int:
    """Return how many threads this rank may use so that the ranks of a host do not compete.

    Launchers set the number of ranks of the host (torchrun LOCAL_WORLD_SIZE, DeepSpeed LOCAL_SIZE).
    Without OMP_NUM_THREADS and without binding, each rank would use all processors.

    Returns:
        This rank's share of the processors; `NO_LIMIT` if OMP_NUM_THREADS or binding limits it.

    Raises:
        ValueError: if LOCAL_WORLD_SIZE or LOCAL_SIZE is not a number.
    """
    if os.environ.get("OMP_NUM_THREADS") or not hasattr(os, "sched_getaffinity"):
        return NO_LIMIT
    processors = len(os.sched_getaffinity(0))
    if processors < len(os.sched_getaffinity(os.getppid())):
        return NO_LIMIT  # bound: these processors are this rank's own
    return max(1, processors // max(1, _ranks_of_this_host()))


def alive(num_threads: int) -> int:
    """Return how many of these threads a kernel can use now: all, or 1 after a fork.

    OpenMP keeps the threads of one kernel for the next.  They do not survive a fork, and a kernel
    in the child would wait for them forever.  The bits of a step do not depend on the number.
    """
    global _has_threads
    if num_threads == 1:
        return 1
    if _had_threads:
        _warn(os.getpid())
        return 1
    _has_threads = True
    return num_threads


@cache
def _warn(process: int) -> None:
    logger.warning(
        "zero8: process %d was forked from one that had taken steps, and steps in one thread; "
        "start training processes with the method 'spawn' to use more",
        process,
    )


def _after_fork() -> None:
    global _had_threads
    _had_threads = _had_threads or _has_threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _ranks_of_this_host() -> int:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if value := os.environ.get(name):
            if not value.isdecimal():
                raise ValueError(
                    f"{name}: got {value!r}, expected the number of ranks of this host"
                )
            return int(value)
    return 1
