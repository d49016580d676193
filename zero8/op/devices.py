# SPDX-License-Identifier: Apache-2.0
"""Which kernel steps on a device."""

import torch

from zero8.op.cuda import Counts, CudaKernel, Launched, cuda_kernel
from zero8.op.kernel import CpuKernel, CpuStep

DEVICES = ("cpu", "cuda")

Kernel = CpuKernel | CudaKernel
Taken = CpuStep | Launched
BlockCounts = CpuStep | Counts


def kernel_on(device: torch.device) -> Kernel:
    """Return the kernel on a device, one of `DEVICES`; compiles it if need be.

    Raises:
        ValueError: if ZERO8_ISA, ZERO8_CUDA_BACKEND or a launcher's variable is not served, or the
            GPU is too old.
        RuntimeError: if there is no compiler, or it fails.
    """
    return CpuKernel() if device.type == "cpu" else cuda_kernel(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether what is done on a device now becomes a part of a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # each has a current stream of its own
        return torch.cuda.is_current_stream_capturing()
