# SPDX-License-Identifier: Apache-2.0
"""Independent jobs on worker processes of one thread each, under one progress bar."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from typing import Any

import torch
from tqdm import tqdm

Job = tuple[Callable[..., Any], tuple]

# Set in workers only: counts the steps that all of them have finished.
_finished = None


def _start_worker(finished) -> None:
    global _finished
    _finished = finished
    # Of OpenMP libraries that are loaded from here on; torch's is loaded already.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def on_step() -> None:
    """Count a step of a job; to be called in workers."""
    with _finished.get_lock():
        _finished.value += 1


def _call(function: Callable, arguments: tuple) -> Any:
    return function(*arguments, on_step)


def run_jobs(jobs: list[Job], *, total_steps: int, workers: int, label: str) -> list:
    """Return the results of `function(*arguments, on_step)` for all jobs, in order.

    Args:
        jobs: functions of importable modules and their arguments, longest first.
        total_steps: how often all of them together call `on_step`.
        workers: number of processes.
        label: of the progress bar.
    """
    context = multiprocessing.get_context("spawn")  # forking a process that has threads may hang
    finished = context.Value("q", 0)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (finished,))
    with pool, tqdm(total=total_steps, desc=label, unit="step") as bar:
        pending = futures = [pool.submit(_call, *job) for job in jobs]
        while pending:
            done, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()  # raises at once what the job raised
            bar.update(finished.value - bar.n)
    return [future.result() for future in futures]
