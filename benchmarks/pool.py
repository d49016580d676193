# SPDX-License-Identifier: Apache-2.0
"""Independent jobs on processes of one thread each, under one progress bar."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch
from tqdm import tqdm

from zero8.op import kernel


def run_all(jobs: Sequence[Callable[[], Any]], workers: int) -> list[Any]:
    """Run jobs, which are picklable, and return their results in the same order.

    Args:
        jobs: longest first.
        workers: number of processes.
    """
    kernel.module()  # compiled here, rather than by two workers at a time
    context = get_context("spawn")  # forking a process that has threads may hang
    with ProcessPoolExecutor(workers, context, _use_one_thread) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in tqdm(as_completed(futures), total=len(futures), unit="job"):
                future.result()  # raises at once what the job raised
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _use_one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # of libraries loaded from here on; torch's is loaded
    torch.set_num_threads(1)
