# SPDX-License-Identifier: Apache-2.0
"""Tensors in mapped temporary files: the system writes them to the disk if memory is short."""

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

SMALL_BYTES = 1 << 20
"""Tensors of at most so many bytes are in memory."""


def mapped_tensor(folder: Path | str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor in a temporary file on the file system of a folder.

    The file has no name, and is freed with the tensor, also if the process is killed.  Each tensor
    has its own storage, as `torch.save` writes whole ones.

    Raises:
        OSError: if the disk has no room; it says how much is free.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes <= SMALL_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    handle, path = tempfile.mkstemp(dir=folder)
    try:
        # Otherwise writing to a page on a full disk would kill the process.
        os.posix_fallocate(handle, 0, num_bytes)
        numel = math.prod(shape)
        return torch.from_file(path, shared=True, size=numel, dtype=dtype).view(tuple(shape))
    except OSError as error:
        disk = os.statvfs(folder)
        free = f"{num_bytes} bytes are needed, {disk.f_bavail * disk.f_frsize} are free"
        raise OSError(error.errno, f"{error.strerror}: {free}", str(folder)) from error
    finally:
        os.close(handle)
        os.unlink(path)
