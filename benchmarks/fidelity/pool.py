# SPDX-License-Identifier: Apache-2.0
"""Independent jobs on worker processes of one thread each, under one progress bar."""

import multiprocessing
import os
import resource
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm


@dataclass(frozen=True)
class Job:
    """What a worker runs: `function(*arguments, on_step)`; jobs that are equal are one job.

    Attributes:
        function: of an importable module.
        arguments: hashable.
        steps: how often the function calls `on_step`.
    """

    function: Callable[..., Any]
    arguments: tuple
    steps: int


# Set in workers only: counts the steps that all of them have finished.
_finished = None


def _start_worker(finished) -> None:
    global _finished
    _finished = finished
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # For OpenMP libraries loaded from here on; torch's is loaded already.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    # The pool ends its workers, but not if it is killed: they would work on for hours.
    multiprocessing.parent_process().join()
    os._exit(1)


def on_step() -> None:
    """Count a step of a job; to be called in workers."""
    with _finished.get_lock():
        _finished.value += 1


def _call(job: Job) -> Any:
    return job.function(*job.arguments, on_step)


def run_jobs(jobs: Iterable[Job], *, workers: int, label: str) -> dict[Job, Any]:
    """Run all jobs, each once, and return their results.

    Args:
        jobs: longest first.
        workers: number of processes.
        label: of the progress bar.
    """
    jobs = list(dict.fromkeys(jobs))
    total = sum(job.steps for job in jobs)
    context = multiprocessing.get_context("spawn")  # forking a process that has threads may hang
    finished = context.Value("q", 0)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (finished,))
    with pool, tqdm(total=total, desc=label, unit="step") as bar:
        pending = futures = [pool.submit(_call, job) for job in jobs]
        while pending:
            done, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()  # raises at once what the job raised
            bar.update(finished.value - bar.n)
    return {job: future.result() for job, future in zip(jobs, futures, strict=True)}


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_seconds() -> float:
    """Return the CPU time of this process and its workers: what a busy machine does not stretch."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
