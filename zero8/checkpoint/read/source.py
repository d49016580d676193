# SPDX-License-Identifier: Apache-2.0
"""The interface of the readers of checkpoints: a stream of whole parameters with their states."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor
from tqdm import tqdm

from zero8.checkpoint.read.fragment import Fragment
from zero8.checkpoint.read.joined import Empty, Parameter, in_memory, joined

MOST_THREADS = 8
"""Each may hold a whole parameter in memory."""
Key = tuple[str, str]
"""The model-parallel part of a parameter, "" without model parallelism, and its name."""
Item, Result = TypeVar("Item"), TypeVar("Result")


@dataclass(frozen=True)
class Facts:
    """Facts on a checkpoint as a whole.

    Attributes:
        kind: "zero", "dcp" or "plain".
        world_size: number of ranks that wrote it, None if unknown.
        stage: ZeRO's stage, None without ZeRO.
    """

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

    def sizes_bytes(self) -> dict[Path, int]:
        """Return the sizes of `files`, 0 for files that cannot be read."""
        return {file: size_bytes_of_path(file) for file in self.files()}

    def damages(self) -> list[str]:
        """Return an error for each file that cannot be read; its fragments are left out."""
        return []

    def check(self, most: int = 5) -> None:
        """Raise ValueError if there are `damages`."""
        if damages := self.damages():
            more = [f"and {len(damages) - most} more"] if len(damages) > most else []
            raise ValueError("; ".join(damages[:most] + more))

    @abstractmethod
    def keys(self) -> list[Key]:
        """Return the parameters that have states."""

    @abstractmethod
    def fragments(self, key: Key) -> list[Fragment]:
        """Return the fragments of a parameter; tensors are mapped, or of this parameter.

        Raises:
            ValueError: naming the file, if it is damaged; values are not checked.
            OSError: if it cannot be read.
        """

    def parameter(self, key: Key, empty: Empty = in_memory, **options: bool) -> Parameter:
        """Return a whole parameter; see `joined` for the options and what is raised."""
        return joined(self.fragments(key), empty, **options)

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


def size_bytes_of_path(path: Path) -> int:
    """Return the size of a file, 0 if it cannot be read; its reader raises then."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def in_threads(
    label: str, items: list[Item], work: Callable[[Item], Result]
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with the result of `work`, in order, with a progress bar on a terminal.

    torch and the hash release Python's lock, so threads run in parallel.
    """
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        results = pool.map(work, items)
        yield from zip(items, tqdm(results, label, len(items), disable=None), strict=True)
