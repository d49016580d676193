# SPDX-License-Identifier: Apache-2.0
"""Calls the CUDA kernel on a list of segments, through the driver that every GPU machine has."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from zero8.op import cuda_compile, kernel
from zero8.op.dynamic_tables import dynamic_maps
from zero8.op.launch import Launch
from zero8.segment import Segment

DRIVER = "libcuda.so.1"


class Driver:
    """The calls of the CUDA driver that a launch takes; torch has made the context."""

    def __init__(self):
        """Load the driver's library; raises OSError where there is none."""
        self._library = ctypes.CDLL(DRIVER)

    def function(self, code: bytes, name: str) -> ctypes.c_void_p:
        """Load machine code into the current context and return a kernel of it, for good."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(code))
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def resident_blocks(self, function: ctypes.c_void_p, threads: int) -> int:
        """Return how many thread blocks of a kernel a multiprocessor works on at a time."""
        count = ctypes.c_int()
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        self._call(name, ctypes.byref(count), function, threads, ctypes.c_size_t(0))
        return count.value

    def launch(
        self,
        function: ctypes.c_void_p,
        grid: int,
        block: tuple[int, int],
        arguments: Sequence[int],
        stream: int,
    ) -> None:
        """Launch a kernel whose arguments are 64-bit numbers and addresses."""
        values = [ctypes.c_uint64(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        shape = (grid, 1, 1, *block, 1)
        self._call("cuLaunchKernel", function, *shape, 0, ctypes.c_void_p(stream), pointers, None)

    def _call(self, name: str, *arguments) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name} failed: {(text.value or b'unknown error').decode()}")


class CudaKernel:
    """The kernel on one GPU."""

    def __init__(self, device: torch.device, backend: str):
        """Compile and load the kernel; raises as `cuda_compile.machine_code` does."""
        properties = torch.cuda.get_device_properties(device)
        code = cuda_compile.machine_code(10 * properties.major + properties.minor, backend)
        self._device = device
        self._processors = properties.multi_processor_count
        self._driver = Driver()
        with torch.cuda.device(device):
            self._function = self._driver.function(code, "zero8_step")
        self._maps: Tensor | None = None

    def run(self, launch: Launch) -> Tensor:
        """Launch on torch's current stream; return the counts of non-finite blocks, on the GPU."""
        with torch.cuda.device(self._device):
            table = self._uploaded(launch.table)
            counts = torch.zeros(launch.num_segments, dtype=torch.int64, device=self._device)
            if launch.uses_maps and self._maps is None:
                self._maps = self._uploaded(dynamic_maps().view(np.uint8))
            base = table.data_ptr()
            arguments = [
                base,
                base + launch.first_blocks_at,
                launch.num_segments,
                base + launch.scalars_at,
                self._maps.data_ptr() if launch.uses_maps else 0,
                counts.data_ptr(),
            ]
            block = launch.team_threads, launch.teams
            resident = self._driver.resident_blocks(self._function, block[0] * block[1])
            grid = launch.grid(resident * self._processors)
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._driver.launch(self._function, grid, block, arguments, stream)
        return counts

    def _uploaded(self, array: np.ndarray) -> Tensor:
        # From pinned memory the host does not wait for it; torch keeps the memory until it is done.
        return torch.from_numpy(array).pin_memory().to(self._device, non_blocking=True)


@lru_cache(maxsize=64)
def cuda_kernel(device: torch.device, backend: str = "auto") -> CudaKernel:
    """Return the kernel on a GPU, compiled and loaded on first use."""
    return CudaKernel(device, backend)


def step(segments: Sequence[Segment], backend: str = "auto") -> Tensor:
    """Take one optimizer step on every segment, in place, in one launch on the current stream.

    The host does not wait for the GPU.

    Args:
        segments: pieces of parameters, all on one GPU; at least one.  See `zero8.segment`.
        backend: "auto", "nvcc" or "nvrtc": how the kernel is compiled on first use.

    Returns:
        For each segment the number of blocks left as they were because a gradient was not finite;
        (num_segments,) int64, on the GPU.

    Raises:
        ValueError: if a tensor has the wrong dtype, device, layout or size, or the GPU is too old.
        RuntimeError: if the kernel cannot be compiled, loaded or launched.
    """
    device = segments[0].param.device
    launch = Launch.of(*kernel.packed(segments, device))
    return cuda_kernel(device, backend).run(launch)
