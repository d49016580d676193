# SPDX-License-Identifier: Apache-2.0
"""Text as bytes: which files, the train/validation split, and batches."""

import random
import sysconfig
from glob import glob
from pathlib import Path
from typing import NamedTuple

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


class Text(NamedTuple):
    """A corpus, 1-D uint8 tensors with an element per byte, and what a record says of it."""

    train: torch.Tensor
    validation: torch.Tensor
    about: dict


def load_text(data: str | None) -> Text:
    """Read a corpus, a folder or file, by default the standard library's sources, and split it."""
    root = Path(sysconfig.get_path("stdlib") if data is None else data)
    files = [root] if root.is_file() else text_files(root, is_stdlib=data is None)
    if root.is_file():
        content = read_bytes(files)
        cut = round((1 - VALIDATION_SHARE) * content.numel())
        train, validation = content[:cut], content[cut:]
    elif len(files) < 2:
        raise ValueError(
            f"found {len(files)} text files in {str(root)!r}, expected at least 2, to split them "
            "into train and validation; pass --data a folder with more, or one file"
        )
    else:
        count = max(1, round(VALIDATION_SHARE * len(files)))
        held = set(random.Random(SPLIT_SEED).sample(files, count))
        train = read_bytes([path for path in files if path not in held])
        validation = read_bytes([path for path in files if path in held])
    sizes = {"train_bytes": len(train), "validation_bytes": len(validation)}
    return Text(train, validation, {"path": str(root), "files": len(files), **sizes})


def text_files(root: Path, is_stdlib: bool) -> list[Path]:
    """Return all files in a folder, without hidden ones, or the sources of a standard library."""
    pattern, left_out = ("**/*.py", STDLIB_EXCLUDED) if is_stdlib else ("**/*", set())
    found = map(Path, glob(pattern, root_dir=root, recursive=True))
    files = [root / path for path in found if not left_out & set(path.parts)]
    return sorted(path for path in files if path.is_file() and (is_stdlib or is_text(path)))


def is_text(path: Path) -> bool:
    """Return whether a file is neither empty nor binary."""
    content = path.read_bytes()
    return len(content) > 0 and b"\0" not in content


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
    """Return random windows, int64 [size, context + 1], fixed by (seed, step, rank)."""
    if text.numel() < context + 1:
        raise ValueError(f"got {text.numel()} bytes of text, expected at least {context + 1}")
    generator = np.random.default_rng((seed, step, rank))
    starts = generator.integers(0, text.numel() - context, size=size)
    return windows(text, starts.tolist(), context)


def validation_windows(text: torch.Tensor, count: int, context: int) -> torch.Tensor:
    """Return `count` evenly spaced windows, or as many as lie side by side, but at least one."""
    count = max(1, min(count, text.numel() // (context + 1)))
    starts = torch.linspace(0, text.numel() - context - 1, count, dtype=torch.float64)
    return windows(text, starts.long().tolist(), context)
