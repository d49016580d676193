# SPDX-License-Identifier: Apache-2.0
"""The kernel of each device."""

import torch

from zero8.op.cuda import CudaKernel, cuda_kernel
from zero8.op.kernel import CpuKernel

DEVICES = ("cpu", "cuda")

Kernel = CpuKernel | CudaKernel


def kernel_on(device: torch.device) -> Kernel:
    """Return the kernel of a device, one of `DEVICES`; compiles it if needed.

    Raises:
        ValueError: if ZERO8_ISA, ZERO8_CUDA_BACKEND or a launcher's variable is invalid, or the GPU
            is too old.
        RuntimeError: if there is no compiler, or it fails.
    """
    return CpuKernel() if device.type == "cpu" else cuda_kernel(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on torch's current stream of a device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # each device has its own current stream
        return torch.cuda.is_current_stream_capturing()
