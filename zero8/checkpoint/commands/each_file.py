# SPDX-License-Identifier: Apache-2.0
"""Processes the files of a checkpoint in threads, with a progress bar."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

Result = TypeVar("Result")


def each_file(
    label: str, sizes_bytes: Mapping[Path, int], work: Callable[[Path], Result]
) -> Iterator[Result]:
    """Yield the results of `work` for each file, in order; each thread takes a file at a time.

    torch and the hash release Python's lock, so threads run in parallel.

    Args:
        label: of the progress bar, which shows bytes, on stderr if that is a terminal.
        sizes_bytes: of each file; the largest should not come last.
        work: processes a file; its exceptions are raised here.
    """
    total = sum(sizes_bytes.values())
    bar = tqdm(total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1024, disable=None)
    with bar, ThreadPoolExecutor(max(1, min(len(sizes_bytes), os.cpu_count() or 1))) as pool:
        for size, result in zip(sizes_bytes.values(), pool.map(work, sizes_bytes), strict=True):
            bar.update(size)
            yield result
