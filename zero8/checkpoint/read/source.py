# SPDX-License-Identifier: Apache-2.0
"""The interface of the readers of checkpoints: files of fragments."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from zero8.checkpoint.read.fragment import Fragment


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
    """A checkpoint that can be read file by file, without a model, an engine or a GPU."""

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

    @abstractmethod
    def fragments(self, file: Path) -> Iterator[Fragment]:
        """Yield the fragments of a file; tensors are mapped, or of one parameter.

        Raises:
            ValueError: naming the file, if it is damaged; values are not checked.
            OSError: if it cannot be read.
        """

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

    def all_fragments(self) -> Iterator[Fragment]:
        """Yield the fragments of all files."""
        for file in self.files():
            yield from self.fragments(file)


def size_bytes_of_path(path: Path) -> int:
    """Return the size of a file, 0 if it cannot be read; its reader raises then."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
