# SPDX-License-Identifier: Apache-2.0
"""Transfers between a local disk and page-locked memory, with checks that DeepSpeed's aio lacks.

aio does not report failed transfers.  So disk blocks are allocated before a write, file sizes are
checked before a read, and misaligned buffers raise.

DeepSpeed numbers the files from a counter of the process, so two jobs with one `nvme_path` use the
same names, while engines of one process do not.  So a process locks its folder until it ends, in
any way.  The lock lies beside the folder, whose files DeepSpeed copies into every checkpoint.
"""

import errno
import os
import weakref
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from zero8.environment import flock

SECTOR_BYTES = 512
"""Buffers must be aligned to this.  Some disks want more; DeepSpeed aligns to 1024."""

_locked: dict[Path, FileIO] = {}


def lock(folder: str) -> None:
    """Lock a folder for this process; raise OSError, with its holder, if another has the lock."""
    path = Path(f"{Path(folder).resolve()}.flock")
    if path in _locked:
        return
    file = flock.opened(path)
    if not flock.take_where_possible(file):
        with file:
            raise OSError(
                errno.EBUSY,
                f"in use: {flock.holder(file)} keeps its optimizer states there; give each job an "
                "nvme_path of its own",
                folder,
            )
    _locked[path] = file


def reserve(path: str, num_bytes: int) -> None:
    """Allocate disk blocks for a file, so that writing this many bytes cannot find the disk full.

    Raises OSError if there is no room; it names the file.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < num_bytes:
            os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        free = os.statvfs(path)
        raise OSError(
            error.errno or errno.EIO,
            f"{error.strerror}: {num_bytes} bytes are needed, {free.f_bavail * free.f_frsize} free",
            str(path),
        ) from error
    finally:
        os.close(descriptor)


class CheckedHandle:
    """DeepSpeed's aio handle, with the checks of this module's docstring."""

    def __init__(self, handle):
        """Wrap a handle that has no transfer under way."""
        self._handle = handle
        self._pending = 0

    def __getattr__(self, name: str):
        """Forward other attributes."""
        return getattr(self._handle, name)

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        """Begin to read; raise OSError or ValueError if the file is missing or too short."""
        return self._begin(self._handle.async_pread, _check_size, buffer, path, offset)

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        """Begin to write; raise OSError if the disk is full."""
        return self._begin(self._handle.async_pwrite, reserve, buffer, path, offset)

    def wait(self) -> int:
        """Wait for all transfers begun, and return their number."""
        self._pending = 0
        return self._handle.wait()

    def _begin(self, begin, check, buffer: Tensor, path: str, offset: int) -> int:
        try:
            check(path, offset + buffer.nbytes)
            if buffer.data_ptr() % SECTOR_BYTES:
                raise ValueError(f"{path}: got a buffer at {buffer.data_ptr():#x}, misaligned")
            if begin(buffer, path, offset):
                raise OSError(errno.EIO, "DeepSpeed's aio refused the transfer", path)
        except (OSError, ValueError):
            # The process crashes if a handle is destroyed with transfers under way.
            if self._pending:
                self.wait()
            raise
        self._pending += 1
        return 0


def _check_size(path: str, end: int) -> None:
    size = os.stat(path).st_size
    if size < end:
        raise ValueError(f"{path}: got {size} bytes, expected {end}; it was cut short")


@dataclass(eq=False)
class Buffer:
    """Page-locked memory for the state of one sub-group at a time; shape (bytes,) uint8.

    `users` are the moments that are views of it.  Callers of `safe_get_local_optimizer_state` may
    hold one after its swap-out.
    """

    memory: Tensor
    users: list[weakref.ref] = field(default_factory=list)

    def evict(self) -> None:
        """Copy moments that are still referenced to memory of their own."""
        for store in filter(None, (ref() for ref in self.users)):
            for name in ("codes", "scales", "dense"):
                setattr(store, name, getattr(store, name).clone())
        self.users.clear()


class BufferPool:
    """Buffers as large as the largest file, allocated when none is free."""

    def __init__(self, handle):
        """Make an empty pool that allocates from an aio handle."""
        self._handle = handle
        self._all: list[Buffer] = []
        self._free: list[Buffer] = []
        self.size_bytes = 0

    def take(self, num_bytes: int) -> Buffer:
        """Return a free buffer of at least this many bytes."""
        self.size_bytes = max(self.size_bytes, num_bytes)
        for number, buffer in enumerate(self._free):
            if buffer.memory.numel() >= num_bytes:
                del self._free[number]
                buffer.evict()
                return buffer
        example = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._all.append(Buffer(self._handle.new_cpu_locked_tensor(self.size_bytes, example)))
        return self._all[-1]

    def give_back(self, buffer: Buffer) -> None:
        """Mark a buffer as free."""
        self._free.append(buffer)

    def __del__(self):
        """Free the memory, which would otherwise stay until the process ends."""
        for buffer in self._all:
            buffer.evict()
            self._handle.free_cpu_locked_tensor(buffer.memory)
