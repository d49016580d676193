# SPDX-License-Identifier: Apache-2.0
"""The kernel of each device."""

import torch

from zero8.op.cuda import CudaKernel, cuda_kernel
from zero8.op.kernel import CpuKernel

DEVICES = ("cpu", "cuda")

Kernel = CpuKernel | CudaKernel


def kernel_on(device: torch.device) -> Kernel:
    """Return the kernel of a device, one of `DEVICES`; compiles it if needed.

    Raises ValueError for a GPU that is too old and for environment variables that are invalid,
    RuntimeError if the kernel cannot be compiled.
    """
    return CpuKernel() if device.type == "cpu" else cuda_kernel(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on torch's current stream of a device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # each device has its own current stream
        return torch.cuda.is_current_stream_capturing()
