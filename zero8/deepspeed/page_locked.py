# SPDX-License-Identifier: Apache-2.0
"""Page-locked memory of exactly the bytes that are asked for.

torch rounds page-locked tensors up to a power of two of bytes: ZeRO's flat tensors may take nearly
twice what they hold.  DeepSpeed's accelerator registers memory of ours with the device instead.
"""

import math
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class _Registered(mmap.mmap):
    """Anonymous memory, a device's as long as a tensor in it lives."""

    unregister: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unregister is not None:  # before the pages go
            self.unregister()


def page_locked_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros in page-locked memory.

    Raises:
        RuntimeError: if the device does not page-lock so much.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils.pin_memory import get_active_native_pinned_memory

    accelerator, num_bytes = get_accelerator(), math.prod(shape) * dtype.itemsize
    if not num_bytes or get_active_native_pinned_memory() is not None:
        return accelerator.pin_empty(tuple(shape), dtype=dtype).zero_()  # is exact, too
    memory = _Registered(-1, num_bytes)
    # Written first by the threads, and in the shares, that step it: see `Placement`.
    result = torch.frombuffer(memory, dtype=dtype).view(tuple(shape)).zero_()
    address = result.data_ptr()
    if not accelerator.register_host_memory(address, num_bytes):
        return accelerator.pin_memory(result)
    memory.unregister = lambda: accelerator.unregister_host_memory(address)
    return result
