# SPDX-License-Identifier: Apache-2.0
"""Text as bytes: which files, the train/validation split, and batches."""

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

VALIDATION_SHARE = 0.05
# Fixed, so that the validation text does not move with the training seed.
SPLIT_SEED = 0
# Left out of the default text: installed packages, tests, and two folders of generated tables
# (near-copies of one another, which would put training text into the validation set).
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test"} | {
    "encodings",
    "pydoc_data",
}


@dataclass(frozen=True)
class Text:
    """A corpus: `train` and `validation` are 1-D uint8 tensors, one element per byte."""

    path: str
    split: str
    files: int
    train: torch.Tensor
    validation: torch.Tensor

    def describe(self) -> dict:
        """Return path, split rule, number of files and bytes of each side, ready for JSON."""
        sizes = {"train_bytes": len(self.train), "validation_bytes": len(self.validation)}
        return {"path": self.path, "split": self.split, "files": self.files, **sizes}


def load_text(data: str | None) -> Text:
    """Read a corpus: a folder or file, or (None) the standard library's own sources.

    The first 95 % of one file are for training; of a folder's files 95 %, which are the same ones
    for the same files.

    Raises:
        ValueError: if there are too few files.
    """
    root = Path(sysconfig.get_path("stdlib") if data is None else data)
    if root.is_file():
        content = read_bytes([root])
        cut = round((1 - VALIDATION_SHARE) * content.numel())
        return Text(str(root), "by position (one file)", 1, content[:cut], content[cut:])
    files = sorted(text_files(root) if data else stdlib_files(root))
    if len(files) < 2:
        raise ValueError(
            f"found {len(files)} text files in {str(root)!r}, expected at least 2, to split them "
            "into train and validation; pass --data a folder with more, or one file"
        )
    count = max(1, round(VALIDATION_SHARE * len(files)))
    chosen = set(random.Random(SPLIT_SEED).sample(range(len(files)), count))
    sides = [[p for i, p in enumerate(files) if (i in chosen) == held] for held in (False, True)]
    return Text(str(root), "by file", len(files), *map(read_bytes, sides))


def stdlib_files(root: Path) -> Iterator[Path]:
    """Yield the sources (*.py) of a standard library."""
    return (p for p in root.rglob("*.py") if not STDLIB_EXCLUDED & set(p.relative_to(root).parts))


def text_files(root: Path) -> Iterator[Path]:
    """Yield the non-empty files under `root` without a NUL byte that are not hidden."""
    for path in root.rglob("*"):
        is_hidden = any(part[0] == "." for part in path.relative_to(root).parts)
        if path.is_file() and not is_hidden and (content := path.read_bytes()):
            if b"\0" not in content:
                yield path


def read_bytes(paths: list[Path]) -> torch.Tensor:
    """Return the files' bytes, joined, as a 1-D uint8 tensor."""
    joined = b"".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def windows(text: torch.Tensor, starts: list[int], context: int) -> torch.Tensor:
    """Return int64 windows of shape [len(starts), context + 1]: inputs and, one later, targets."""
    return torch.stack([text[start : start + context + 1] for start in starts]).long()


def train_batch(
    text: torch.Tensor, size: int, context: int, *, seed: int, step: int, rank: int
) -> torch.Tensor:
    """Return random windows, int64 [size, context + 1], fixed by (seed, step, rank).

    Raises:
        ValueError: if the text is shorter than one window.
    """
    if text.numel() < context + 1:
        raise ValueError(
            f"got {text.numel()} bytes of text, expected at least {context + 1} (one window)"
        )
    generator = np.random.default_rng((seed, step, rank))
    starts = generator.integers(0, text.numel() - context, size=size)
    return windows(text, starts.tolist(), context)


def validation_windows(text: torch.Tensor, count: int, context: int) -> torch.Tensor:
    """Return evenly spaced windows, int64 [number, context + 1]; no seed enters.

    There are `count` of them, but no more than lie side by side in the text, and at least one.
    """
    count = max(1, min(count, text.numel() // (context + 1)))
    starts = torch.linspace(0, text.numel() - context - 1, count, dtype=torch.float64)
    return windows(text, starts.long().tolist(), context)
