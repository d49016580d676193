# SPDX-License-Identifier: Apache-2.0
"""For conversions: tensors on disk instead of in memory, and atomic output."""

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from zero8.files.atomic import sync_folder

SMALL_BYTES = 1 << 20
"""Smaller tensors are in memory."""


def mapped_tensor(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor in a mapped temporary file on the file system of a folder.

    The system can write it to the disk if memory is short; the file is freed with the tensor.  Each
    has its own storage, as `torch.save` writes whole ones.
    """
    numel = math.prod(shape)
    if numel * dtype.itemsize < SMALL_BYTES:
        return torch.empty(shape, dtype=dtype)
    handle, path = tempfile.mkstemp(dir=folder)
    try:
        # Otherwise writing to a page on a full disk would kill the process.
        os.posix_fallocate(handle, 0, numel * dtype.itemsize)
        return torch.from_file(path, shared=True, size=numel, dtype=dtype).view(shape)
    finally:
        os.close(handle)
        os.unlink(path)


@contextlib.contextmanager
def made_beside(target: Path) -> Iterator[Path]:
    """Yield a path for a file or a folder that is renamed to `target` at the end of the block.

    It lies in a temporary hidden folder beside `target`.  An error in the block leaves no target.
    Missing parents of the target are created.
    """
    _check_is_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        yield folder / target.name
        for path, _, _ in os.walk(folder / target.name):
            sync_folder(Path(path))
        _check_is_free(target)
        (folder / target.name).rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save(content: object, path: Path) -> None:
    """Write a file by `torch.save`, and sync it to the disk."""
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _check_is_free(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target} exists; remove it or name another output")
