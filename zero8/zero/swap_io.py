# SPDX-License-Identifier: Apache-2.0
"""Transfers between a local disk and page-locked memory, checked where DeepSpeed's aio is silent.

aio reports no failed transfer.  So files get their disk blocks before they are written, their sizes
are compared before they are read, and buffers that the disk cannot read into are refused.
"""

import errno
import os
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero8.state.store import MomentStore
from zero8.zero import swap_file

SECTOR_BYTES = 512
"""What addresses of buffers must be multiples of.  Some disks want more; DeepSpeed gives 1024."""


class CheckedHandle:
    """DeepSpeed's aio handle, with the checks that it leaves out; see the module."""

    def __init__(self, handle):
        """Take over a handle that has nothing under way."""
        self._handle = handle
        self._pending = 0

    def __getattr__(self, name: str):
        """Return what else the handle has."""
        return getattr(self._handle, name)

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        """Begin to read; raise OSError or ValueError if the file is missing or too short."""
        try:
            size = os.stat(path).st_size
            if size < offset + buffer.nbytes:
                raise ValueError(
                    f"{path}: got {size} bytes, expected {offset + buffer.nbytes}; it was cut short"
                )
            return self._begun(self._handle.async_pread, buffer, path, offset)
        except (OSError, ValueError):
            self._settle()
            raise

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        """Begin to write; raise OSError if the disk is full."""
        try:
            swap_file.reserve(path, offset + buffer.nbytes)
            return self._begun(self._handle.async_pwrite, buffer, path, offset)
        except (OSError, ValueError):
            self._settle()
            raise

    def wait(self) -> int:
        """Wait for all that was begun, and return how many these were."""
        self._pending = 0
        return self._handle.wait()

    def _begun(self, begin, buffer: Tensor, path: str, offset: int) -> int:
        if buffer.data_ptr() % SECTOR_BYTES:
            raise ValueError(f"{path}: got a buffer at {buffer.data_ptr():#x}, misaligned")
        if begin(buffer, path, offset):
            raise OSError(errno.EIO, "DeepSpeed's aio refused the transfer", path)
        self._pending += 1
        return 0

    def _settle(self) -> None:
        # A handle that dies with transfers under way takes the process along.
        if self._pending:
            self.wait()


@dataclass(eq=False)
class Buffer:
    """Page-locked memory that the state of one sub-group at a time lives in.

    Attributes:
        memory: (bytes,) uint8.
        users: the moments that were made on it; whoever reads a moment after its swap-out, as
            `safe_get_local_optimizer_state` lets one do, still holds it.
    """

    memory: Tensor
    users: list[weakref.ref] = field(default_factory=list)

    def evict(self) -> None:
        """Give moments that are still in use memory of their own."""
        for store in filter(None, (ref() for ref in self.users)):
            for name in ("codes", "scales", "dense"):
                setattr(store, name, getattr(store, name).clone())
        self.users.clear()

    def lend(self, stores: list[MomentStore]) -> None:
        """Remember moments that live here."""
        self.users += [weakref.ref(store) for store in stores]


class BufferPool:
    """Buffers, each as large as the largest file, made when one is needed and none is free."""

    def __init__(self, handle):
        """Make an empty pool whose memory comes from an aio handle."""
        self._handle = handle
        self._all: list[Buffer] = []
        self._free: list[Buffer] = []
        self.size_bytes = 0

    def take(self, num_bytes: int) -> Buffer:
        """Return a buffer of at least this many bytes, that nothing else uses."""
        self.size_bytes = max(self.size_bytes, num_bytes)
        for number, buffer in enumerate(self._free):
            if buffer.memory.numel() >= num_bytes:
                del self._free[number]
                buffer.evict()
                return buffer
        example = torch.empty(0, dtype=torch.uint8, device="cpu")
        memory = self._handle.new_cpu_locked_tensor(self.size_bytes, example)
        self._all.append(Buffer(memory))
        return self._all[-1]

    def give_back(self, buffer: Buffer) -> None:
        """Let others use a buffer."""
        self._free.append(buffer)

    def __del__(self):
        """Return the memory, which belongs to the process, as DeepSpeed does with its own."""
        for buffer in self._all:
            buffer.evict()
            self._handle.free_cpu_locked_tensor(buffer.memory)
