# SPDX-License-Identifier: Apache-2.0
"""The interface of the readers of checkpoints: files of fragments."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
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


MOST_BYTES_PER_BYTE = 8
"""The limit on the bytes of moments per byte of the files; in valid files it is at most 2, for
bfloat16 moments that are read as float32."""


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

    def fragments(self, file: Path) -> Iterator[Fragment]:
        """Yield the fragments of a file; tensors are mapped, or of one chunk.

        Raises:
            ValueError: naming the file, if it is damaged, or its moments share bytes, so that a
                small file would take long to read; values are not checked.
            OSError: if it cannot be read.
        """
        left_bytes = MOST_BYTES_PER_BYTE * self._num_bytes
        for fragment in self._fragments(file):
            buffers = (buffer for store in fragment.stores for buffer in store.buffers)
            left_bytes -= sum(buffer.numel() * buffer.element_size() for buffer in buffers)
            if left_bytes < 0:
                raise ValueError(f"{file}: damaged: got moments that share the bytes of the file")
            yield fragment

    @cached_property
    def _num_bytes(self) -> int:
        return sum(self.sizes_bytes().values())

    @abstractmethod
    def _fragments(self, file: Path) -> Iterator[Fragment]:
        """Yield the fragments of a file, without the check of `fragments`."""

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

    def counters(self) -> dict:
        """Return the saved progress of the run, under DeepSpeed's names."""
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
