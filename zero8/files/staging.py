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

FILE_BYTES = 1 << 26
"""The size of the files of `Staging`; a larger tensor has its own."""
_ALIGNMENT_BYTES = 64


class Staging:
    """Tensors in mapped temporary files, which the system can write to disk if memory is short.

    A file is freed with its last tensor.
    """

    def __init__(self, folder: Path):
        """Create the files, without names, on the file system of a folder."""
        self._folder = folder
        self._storage, self._used_bytes = torch.UntypedStorage(0), 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor of its own storage, as `torch.save` writes whole ones."""
        needed_bytes = math.prod(shape) * dtype.itemsize
        if needed_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        if self._used_bytes + needed_bytes > self._storage.nbytes():
            self._storage, self._used_bytes = self._file(max(needed_bytes, FILE_BYTES)), 0
        begin = self._used_bytes
        self._used_bytes += -(-needed_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        storage = self._storage[begin : begin + needed_bytes]
        stride = torch.empty(shape, device="meta").stride()
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)

    def copy(self, values: Tensor) -> Tensor:
        """Return a copy of a tensor."""
        return self.empty(tuple(values.shape), values.dtype).copy_(values.detach())

    def _file(self, size_bytes: int) -> torch.UntypedStorage:
        handle, path = tempfile.mkstemp(dir=self._folder)
        try:
            # Otherwise writing to a page on a full disk would kill the process.
            os.posix_fallocate(handle, 0, size_bytes)
            made = torch.UntypedStorage.from_file(path, shared=True, nbytes=size_bytes)
            return made  # type: ignore[return-value]  # torch annotates a base of it
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
