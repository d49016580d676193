# SPDX-License-Identifier: Apache-2.0
"""Text as bytes: which files, the train/validation split, batches, and the unigram entropy."""

import random
import sysconfig
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
    train: torch.Tensor
    validation: torch.Tensor
    train_files: int
    validation_files: int

    def describe(self) -> dict:
        """Return path, split rule, number of files and bytes of each side, ready for JSON."""
        return {
            "path": self.path,
            "split": self.split,
            "files": self.train_files + self.validation_files,
            "bytes": self.train.numel() + self.validation.numel(),
            "train_files": self.train_files,
            "train_bytes": self.train.numel(),
            "validation_files": self.validation_files,
            "validation_bytes": self.validation.numel(),
        }


def stdlib_files() -> tuple[Path, list[Path]]:
    """Return the running Python's standard library folder and its sources (*.py), sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (p for p in root.rglob("*.py") if not STDLIB_EXCLUDED & set(p.relative_to(root).parts))
    return root, sorted(files)


def folder_files(root: Path) -> list[Path]:
    """Return the non-empty text files under `root`, hidden ones left out, sorted by path.

    A file counts as text when it holds no NUL byte (the rule that grep and git use).
    """
    visible = (
        p for p in root.rglob("*") if not any(x[0] == "." for x in p.relative_to(root).parts)
    )
    return sorted(p for p in visible if p.is_file() and is_text(p))


def is_text(path: Path) -> bool:
    """Return whether the file is not empty and holds no NUL byte."""
    content = path.read_bytes()
    return bool(content) and b"\0" not in content


def split_files(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Split files 95/5 into train and validation, at least one each; the same for the same list."""
    if len(files) < 2:
        raise ValueError(
            f"got {len(files)} files to split into train and validation, expected at least 2; "
            "pass --data a folder with more text files, or one file to split it by position"
        )
    count = max(1, round(VALIDATION_SHARE * len(files)))
    chosen = set(random.Random(SPLIT_SEED).sample(range(len(files)), count))
    train = [path for i, path in enumerate(files) if i not in chosen]
    validation = [path for i, path in enumerate(files) if i in chosen]
    return train, validation


def load_text(data: str | None) -> Text:
    """Read a corpus: a folder or file, or (None) the standard library's own sources."""
    root, files = stdlib_files() if data is None else (Path(data), None)
    if root.is_file():
        return split_one_file(root)
    if not root.is_dir():
        raise ValueError(f"got data path {str(root)!r}, expected an existing file or folder")
    files = folder_files(root) if files is None else files
    if not files:
        raise ValueError(
            f"found no text files in {str(root)!r}; pass --data a folder with text, or a file"
        )
    train, validation = split_files(files)
    return Text(
        path=str(root),
        split="by file",
        train=read_bytes(train),
        validation=read_bytes(validation),
        train_files=len(train),
        validation_files=len(validation),
    )


def split_one_file(path: Path) -> Text:
    """Split a single file by position: the first 95% of its bytes train, the rest validate."""
    content = read_bytes([path])
    cut = round((1 - VALIDATION_SHARE) * content.numel())
    return Text(
        path=str(path),
        split="by position (one file)",
        train=content[:cut],
        validation=content[cut:],
        train_files=1,
        validation_files=1,
    )


def read_bytes(paths: list[Path]) -> torch.Tensor:
    """Return the files' bytes, joined, as a 1-D uint8 tensor."""
    joined = b"".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def unigram_entropy(text: torch.Tensor) -> float:
    """Return the entropy of the byte frequencies of a 1-D uint8 tensor, in nats per byte.

    It is the lowest loss that a model which ignores context can reach on this text.
    """
    counts = torch.bincount(text, minlength=256).double()
    frequency = counts[counts > 0] / text.numel()
    return -(frequency * frequency.log()).sum().item()


def require_window(text: torch.Tensor, context: int, name: str) -> None:
    """Raise ValueError when the text is shorter than one window of context + 1 bytes."""
    if text.numel() < context + 1:
        raise ValueError(
            f"got {text.numel()} bytes of {name} text, expected at least {context + 1} (one "
            "window); pass --data with more text"
        )


def windows(text: torch.Tensor, starts: list[int], context: int) -> torch.Tensor:
    """Return int64 windows of shape [len(starts), context + 1]: inputs and, one later, targets."""
    return torch.stack([text[start : start + context + 1] for start in starts]).long()


def train_batch(
    text: torch.Tensor, size: int, context: int, *, seed: int, step: int, rank: int
) -> torch.Tensor:
    """Return random windows, int64 [size, context + 1], fixed by (seed, step, rank)."""
    require_window(text, context, "train")
    generator = np.random.default_rng((seed, step, rank))
    starts = generator.integers(0, text.numel() - context, size=size)
    return windows(text, starts.tolist(), context)


def validation_windows(text: torch.Tensor, count: int, context: int) -> torch.Tensor:
    """Return evenly spaced windows, int64 [number, context + 1]; no seed enters.

    There are `count` of them, but no more than lie side by side in the text.
    """
    require_window(text, context, "validation")
    count = min(count, text.numel() // (context + 1))
    starts = torch.linspace(0, text.numel() - context - 1, count, dtype=torch.float64)
    return windows(text, starts.long().tolist(), context)
