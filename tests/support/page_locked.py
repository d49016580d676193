# SPDX-License-Identifier: Apache-2.0
"""A stand-in for page-locked memory, which a machine without a GPU lacks.

Tensors that are page-locked are copies, as with a GPU, and take a power of two of bytes, as torch's
CachingHostAllocator.h says; memory that is registered takes what it has.
"""

import mmap
from contextlib import contextmanager
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator

from zero8.deepspeed.moment_tensor import MomentTensor


class PageLocked:
    """What is page-locked: bytes by address, of torch's allocator and of registered memory."""

    def __init__(self):
        self.rounded, self.registered, self.registers = {}, {}, True

    def pin_memory(self, tensor, make_copy=True, match_shape=True):
        if not tensor.numel():
            return tensor
        memory = _Memory(-1, tensor.nbytes)
        copy = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
        address = copy.data_ptr()
        memory.forget = lambda: self.rounded.pop(address)
        self.rounded[address] = tensor.nbytes
        return copy

    def register(self, address, num_bytes):
        if self.registers:
            self.registered[address] = num_bytes
        return self.registers

    def is_pinned(self, tensor):
        if isinstance(tensor, MomentTensor):  # without memory of its own
            return False
        address = tensor.untyped_storage().data_ptr()
        return address in self.rounded or address in self.registered

    def added_bytes(self, others=()):
        """Return what rounding adds, to other sizes, too."""
        sizes = [*self.rounded.values(), *others]
        return sum((1 << (size - 1).bit_length()) - size for size in sizes)


class _Memory(mmap.mmap):
    """Memory that is forgotten when it is freed."""

    def __del__(self):
        self.forget()


@contextmanager
def page_locked():
    """Have DeepSpeed's accelerator page-lock memory in the block."""
    memory, patched = PageLocked(), mock.patch.object
    accelerator = get_accelerator()
    with (
        patched(accelerator, "pin_memory", memory.pin_memory),
        patched(accelerator, "register_host_memory", memory.register),
        patched(accelerator, "unregister_host_memory", memory.registered.pop),
        patched(torch.Tensor, "is_pinned", lambda tensor: memory.is_pinned(tensor)),
    ):
        yield memory
