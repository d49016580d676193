# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as files of fragments, whichever framework has written it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zero8.checkpoint.fragment import Fragment


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

    @abstractmethod
    def fragments(self, file: Path) -> Iterator[Fragment]:
        """Yield what a file holds; tensors are mapped into memory or of one chunk.

        Raises:
            ValueError: naming the file, if it is damaged; values are not looked at.
            OSError: if it cannot be read.
        """

    @abstractmethod
    def groups(self) -> list[dict]:
        """Return the settings of the parameter groups, each with the names of its "params"."""

    def all_fragments(self) -> Iterator[Fragment]:
        """Yield the fragments of all files."""
        for file in self.files():
            yield from self.fragments(file)
