# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as files of fragments, whichever framework has written it."""

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
    """What is known of a checkpoint as a whole.

    Attributes:
        kind: "zero", "dcp" or "plain".
        world_size: ranks that have written it, None if it does not say.
        stage: of ZeRO, None elsewhere.
    """

    kind: str
    world_size: int | None = None
    stage: int | None = None


MOST_BYTES_PER_BYTE = 8
"""How many bytes of moments a byte of the files may become; the most are 2, where bfloat16 moments
of another Adam are decoded to float32."""


class Source(ABC):
    """A checkpoint that can be read file by file, without a model, an engine or a GPU."""

    path: Path
    """What holds it: a folder, or the one file."""

    @abstractmethod
    def facts(self) -> Facts:
        """Return what is known of the whole."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files that hold states of the optimizer."""

    def sizes_bytes(self) -> dict[Path, int]:
        """Return the sizes of `files`, 0 of those that cannot be looked at."""
        return {file: size_bytes_of_path(file) for file in self.files()}

    def fragments(self, file: Path) -> Iterator[Fragment]:
        """Yield what a file holds; tensors are mapped into memory or of one chunk.

        Raises:
            ValueError: naming the file, if it is damaged, or its moments share bytes, so that a
                small file would take long; values are not looked at.
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
        """Yield what `fragments` yields."""

    @abstractmethod
    def groups(self) -> list[dict]:
        """Return the settings of the parameter groups, each with the names of its "params"."""

    @abstractmethod
    def tensors(self) -> dict[str, Callable[[], Tensor]]:
        """Return, by name, functions that read the model's tensors as far as they are saved.

        Parameters whose master weights are in fragments may be there in lower precision.
        """

    def tied(self) -> dict[str, str]:
        """Return second names of parameters, and their first, where the checkpoint says so."""
        return {}

    def counters(self) -> dict:
        """Return what is saved of a run's progress, under DeepSpeed's names."""
        return {}

    def all_fragments(self) -> Iterator[Fragment]:
        """Yield the fragments of all files."""
        for file in self.files():
            yield from self.fragments(file)


def size_bytes_of_path(path: Path) -> int:
    """Return the size of a file, 0 if it cannot be looked at."""
    try:
        return os.lstat(path).st_size
    except OSError:  # whoever reads it says so
        return 0
