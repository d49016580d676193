# SPDX-License-Identifier: Apache-2.0
"""Calls the CUDA kernel.

The host waits for the GPU only when a kernel is loaded.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zero8.op import cuda_compile, kernel
from zero8.op.codec_maps import codec_maps
from zero8.op.cuda_driver import Driver
from zero8.op.launch import Launch, kernel_of
from zero8.spec.algorithms import ALGORITHMS
from zero8.spec.segment import Segment


class Counts:
    """Numbers written by a GPU, copied asynchronously to the host."""

    def __init__(self, counts: Tensor):
        """Start the copy, behind the work of torch's current stream."""
        with torch.cuda.device(counts.device):
            self._host = torch.empty(counts.shape, dtype=counts.dtype, device="cpu").pin_memory()
            self._host.copy_(counts, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def have_arrived(self) -> bool:
        """Return whether `read` would return at once."""
        arrived: bool = self._copied.query()
        return arrived

    def read(self) -> np.ndarray:
        """Wait for the numbers and return them."""
        self._copied.synchronize()
        return self._host.numpy()


class CudaKernel:
    """The kernel on one GPU."""

    def __init__(self, device: torch.device, backend: str):
        """Compile and load the kernel; raises as `cuda_compile.machine_code` does."""
        code = cuda_compile.machine_code(Gpu.of(device).architecture, backend)
        self._device = device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._driver = Driver()
        with torch.cuda.device(device):
            # The driver needs a context in this thread, which a call of the runtime makes.
            torch.cuda.synchronize()
            self._functions = _loaded(self._driver, code)
        self._maps: Tensor | None = None

    def step(self, records: np.ndarray, scalars: np.ndarray) -> Counts:
        """Take a step over `kernel.packed` segments, behind the work of torch's current stream.

        Returns:
            The blocks left unchanged.

        Raises:
            ValueError: if a field of a segment is invalid; the message names it.
        """
        return Counts(self.launch(Launch.of(records, scalars)))

    def launch(self, launch: Launch) -> Tensor:
        """Launch on torch's current stream.

        Returns:
            The counts of blocks left unchanged: (num_segments,) int64, on the GPU.
        """
        with torch.cuda.device(self._device):
            if launch.uses_maps and self._maps is None:
                self._maps = self._pinned(codec_maps().view(np.uint8)).to(self._device)
            table = self._pinned(launch.table).to(self._device, non_blocking=True)
            return self._launched(launch, table)

    def _launched(self, launch: Launch, table: Tensor) -> Tensor:
        skipped = torch.zeros(launch.num_segments, dtype=torch.int64, device=self._device)
        base, maps = table.data_ptr(), 0
        if launch.uses_maps:
            assert self._maps is not None, "the first launch that uses maps makes them"
            maps = self._maps.data_ptr()
        arguments = [
            base,
            base + launch.first_blocks_at,
            launch.num_segments,
            base + launch.scalars_at,
            maps,
            skipped.data_ptr(),
        ]
        block, function = (launch.team_threads, launch.teams), self._functions[launch.kernel]
        resident = self._driver.resident_blocks(function, block[0] * block[1])
        grid = launch.grid(resident * self._processors)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._driver.launch(function, grid, block, arguments, stream)
        return skipped

    @staticmethod
    def _pinned(array: np.ndarray) -> Tensor:
        # Copies from pinned memory are asynchronous; torch keeps it until the copy is done.
        return torch.from_numpy(array).pin_memory()


def _loaded(driver: Driver, code: bytes) -> dict[str, ctypes.c_void_p]:
    try:
        return driver.functions(code, {kernel_of(one) for one in ALGORITHMS})
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}; is the driver older than the kernel's compiler (zero8 doctor names the "
            "compiler, nvidia-smi the CUDA version of the driver)?  For CUDA 12: pip install "
            "'zero8[cuda12]' and set ZERO8_CUDA_BACKEND=nvrtc"
        ) from error


class Gpu(NamedTuple):
    """A GPU: name, compute capability as one number (9.0 is 90), whether the kernel supports it."""

    name: str
    architecture: int
    is_served: bool

    @classmethod
    def of(cls, device: torch.device | int) -> "Gpu":
        """Return the GPU of a device."""
        properties = torch.cuda.get_device_properties(device)
        architecture = 10 * properties.major + properties.minor
        served = architecture >= cuda_compile.LOWEST_ARCHITECTURE and torch.version.hip is None
        return cls(properties.name, architecture, served)


def gpus() -> list[Gpu]:
    """Return the GPUs that torch sees."""
    return [Gpu.of(number) for number in range(torch.cuda.device_count())]


@lru_cache(maxsize=64)
def cuda_kernel(device: torch.device, backend: str | None = None) -> CudaKernel:
    """Return the kernel on a GPU, compiled and loaded on first use.

    Args:
        device: the GPU, with its index.
        backend: one of `cuda_compile.BACKENDS`; `cuda_compile.default_backend()` if None.
    """
    return CudaKernel(device, backend or cuda_compile.default_backend())


def step(segments: Sequence[Segment], backend: str | None = None) -> Tensor:
    """Take one optimizer step on every segment, in place, in one launch on the current stream.

    The host does not wait for the GPU.

    Args:
        segments: pieces of parameters, all on one GPU; at least one.  See `zero8.spec.segment`.
        backend: how the kernel is compiled on first use; see `cuda_kernel`.

    Returns:
        For each segment the number of blocks left unchanged because a gradient was not finite;
        (num_segments,) int64, on the GPU.

    Raises:
        ValueError: if a tensor has the wrong dtype, device, layout or size, or the GPU is too old.
        RuntimeError: if the kernel cannot be compiled, loaded or launched.
    """
    device = segments[0].param.device
    packed = kernel.packed(segments, device)
    return cuda_kernel(device, backend).launch(Launch.of(*packed))
