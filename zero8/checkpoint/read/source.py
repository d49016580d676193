# SPDX-License-Identifier: Apache-2.0
"""The interface of the readers of checkpoints: a stream of parameters with their states.

A damaged file raises ValueError with its name, one that cannot be read OSError.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import Tensor
from tqdm import tqdm

from zero8.checkpoint.read.fragment import Fragment

MOST_THREADS = 8
"""Each may hold a whole parameter in memory."""
Item, Result = TypeVar("Item"), TypeVar("Result")


class Facts(NamedTuple):
    """What wrote a checkpoint: "zero", "dcp" or "plain", its ranks and ZeRO's stage, if known."""

    kind: str
    world_size: int | None = None
    stage: int | None = None


class Source(ABC):
    """A checkpoint that is read parameter by parameter, without a model, an engine or a GPU."""

    path: Path
    """Its folder, or its only file."""

    @abstractmethod
    def facts(self) -> Facts:
        """Return facts on the whole."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files that hold states of the optimizer."""

    def damages(self) -> list[str]:
        """Return an error for each file that cannot be read; its fragments are left out."""
        return []

    def check(self, most: int = 5) -> None:
        """Raise ValueError if there are `damages`."""
        if damages := self.damages():
            more = [f"and {len(damages) - most} more"] if len(damages) > most else []
            raise ValueError("; ".join(damages[:most] + more))

    @abstractmethod
    def names(self) -> list[str]:
        """Return the parameters that have states."""

    @abstractmethod
    def fragments(self, name: str) -> list[Fragment]:
        """Return the fragments of a parameter; tensors are mapped, or of this parameter."""

    @abstractmethod
    def groups(self) -> list[dict]:
        """Return the options of the parameter groups, each with the names of its "params"."""

    @abstractmethod
    def tensors(self) -> dict[str, Callable[[], Tensor]]:
        """Return, by name, functions that read the saved tensors of the model.

        Parameters whose master weights are in fragments may have lower precision here.
        """

    def tied(self) -> dict[str, str]:
        """Return the further names of shared parameters, with their first names, if saved."""
        return {}

    def run(self) -> dict:
        """Return the progress of the run and what its script saved, under DeepSpeed's names."""
        return {}

    def scaling(self) -> dict:
        """Return the state of loss scaling and clipping, under DeepSpeed's names."""
        return {}


def sizes_bytes(files: list[Path]) -> dict[Path, int]:
    """Return the sizes of files, 0 for those that cannot be read: their reader raises then."""

    def size(file: Path) -> int:
        try:
            return os.lstat(file).st_size
        except OSError:
            return 0

    return {file: size(file) for file in files}


def in_threads(
    label: str, items: list[Item], work: Callable[[Item], Result]
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with the result of `work`, in order, with a progress bar on a terminal.

    torch and the hash release Python's lock, so threads run in parallel.
    """
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        results = pool.map(work, items)
        yield from zip(items, tqdm(results, label, len(items), disable=None), strict=True)
