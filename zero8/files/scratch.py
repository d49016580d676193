# SPDX-License-Identifier: Apache-2.0
"""Tensors in mapped temporary files: the system writes them to the disk if memory is short."""

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_files = WeakTensorKeyDictionary()

SMALL_BYTES = 1 << 20
"""Tensors of at most so many bytes are in memory."""


def mapped_tensor(folder: Path | str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor in a temporary file on the file system of a folder.

    The file has no name, and is freed with the tensor, also if the process is killed.  Each tensor
    has its own storage, as `torch.save` writes whole ones.

    Raises:
        OSError: if the disk has no room; it says how much is free.
    """
    numel = math.prod(shape)
    num_bytes = numel * dtype.itemsize
    if num_bytes <= SMALL_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    handle, path = tempfile.mkstemp(dir=folder)
    try:
        # Otherwise writing to a page on a full disk would kill the process.
        os.posix_fallocate(handle, 0, in_pages(num_bytes))
        mapped = torch.from_file(path, shared=True, size=numel, dtype=dtype).view(tuple(shape))
        _files[mapped] = _opened_past_the_cache(path)
        return mapped
    except OSError as error:
        disk = os.statvfs(folder)
        free = f"{num_bytes} bytes are needed, {disk.f_bavail * disk.f_frsize} are free"
        raise OSError(error.errno, f"{error.strerror}: {free}", str(folder)) from error
    finally:
        os.close(handle)
        os.unlink(path)


def file_of(tensor: Tensor) -> FileIO | None:
    """Return the file of a `mapped_tensor`, None of another tensor.

    Transfers are of whole pages, and past the page cache where the file system has such.
    """
    file: FileIO | None = _files.get(tensor)
    return file


def in_pages(num_bytes: int) -> int:
    """Return the bytes of the pages that so many bytes take."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _opened_past_the_cache(path: str) -> FileIO:
    with suppress(OSError):
        return FileIO(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT), "r+")
    return FileIO(path, "r+")
