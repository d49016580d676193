# SPDX-License-Identifier: Apache-2.0
"""The kernel of each device."""

from typing import Protocol

import numpy as np
import torch

from zero8.op.cuda import CudaKernel, cuda_kernel
from zero8.op.kernel import CpuKernel

DEVICES = ("cpu", "cuda")

Kernel = CpuKernel | CudaKernel


class BlockCounts(Protocol):
    """Counts of blocks that a step has left unchanged, a number for each segment."""

    def have_arrived(self) -> bool:
        """Return whether they can be read without waiting."""

    def read(self) -> np.ndarray:
        """Return them, (segments,) int64; waits for a GPU."""


def kernel_on(device: torch.device) -> Kernel:
    """Return the kernel of a device, one of `DEVICES`; compiles it if needed.

    Raises:
        ValueError: if ZERO8_ISA, ZERO8_CUDA_BACKEND or a launcher's variable is invalid, or the GPU
            is too old.
        RuntimeError: if there is no compiler, or it fails.
    """
    if device.type == "cpu":
        return CpuKernel()
    return cuda_kernel(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on torch's current stream of a device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # each device has its own current stream
        return torch.cuda.is_current_stream_capturing()
