# SPDX-License-Identifier: Apache-2.0
"""What the readers of checkpoints return: a stream of parameters with their states.

A damaged file raises ValueError with its name, one that cannot be read OSError.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torch import Tensor
from tqdm import tqdm

from zero8.checkpoint.read.fragment import Fragment

MOST_THREADS = 8
"""Each may hold a whole parameter in memory."""
Item, Result = TypeVar("Item"), TypeVar("Result")


@dataclass(frozen=True)
class Source:
    """A checkpoint that is read parameter by parameter, without a model, an engine or a GPU.

    Attributes:
        kind: what wrote it: "zero", "dcp" or "plain".
        path: its folder, or its only file.
        files: the files that hold states of the optimizer.
        names: the parameters that have states.
        fragments: returns the fragments of a parameter; tensors are mapped, or of this parameter.
        groups: returns the options of the parameter groups, each with the names of its "params".
        tensors: by name, what reads the saved tensors of the model.  Parameters whose master
            weights are in fragments may have lower precision here.
        world_size: the number of ranks that wrote it, if known.
        stage: ZeRO's stage, if known.
        tied: the further names of shared parameters, with their first names, if saved.
        run: the progress of the run and what its script saved, under DeepSpeed's names.
        scaling: the state of loss scaling and clipping, under DeepSpeed's names.
    """

    kind: str
    path: Path
    files: list[Path]
    names: list[str]
    fragments: Callable[[str], list[Fragment]]
    groups: Callable[[], list[dict]]
    tensors: dict[str, Callable[[], Tensor]]
    world_size: int | None = None
    stage: int | None = None
    tied: dict[str, str] = field(default_factory=dict)
    run: dict = field(default_factory=dict)
    scaling: dict = field(default_factory=dict)


def in_threads(
    label: str, items: list[Item], work: Callable[[Item], Result]
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with the result of `work`, in order, with a progress bar on a terminal.

    torch and the hash release Python's lock, so threads run in parallel.
    """
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        results = pool.map(work, items)
        yield from zip(items, tqdm(results, label, len(items), disable=None), strict=True)
