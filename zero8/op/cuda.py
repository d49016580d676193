# SPDX-License-Identifier: Apache-2.0
"""Calls the CUDA kernel: at once, or as a part of a CUDA graph.

The host waits for the GPU when a kernel is loaded, and then no more.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zero8.algorithms.table import ALGORITHMS
from zero8.op import cuda_compile, kernel
from zero8.op.cuda_driver import Driver
from zero8.op.dynamic_tables import dynamic_maps
from zero8.op.launch import Launch, kernel_of
from zero8.spec.segment import Segment


class Counts:
    """Numbers that a GPU will have written, on their way to the host."""

    def __init__(self, counts: Tensor):
        """Ask for a copy, behind the work of torch's current stream."""
        with torch.cuda.device(counts.device):
            self._host = torch.empty(counts.shape, dtype=counts.dtype, device="cpu").pin_memory()
            self._host.copy_(counts, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def have_arrived(self) -> bool:
        """Return whether `read` need not wait."""
        arrived: bool = self._copied.query()
        return arrived

    def read(self) -> np.ndarray:
        """Wait for the numbers and return them."""
        self._copied.synchronize()
        return self._host.numpy()


@dataclass(frozen=True)
class Launched:
    """What a launch left on the GPU.

    Attributes:
        launch: what was launched.
        table: its table, `Launch.table`, on the GPU.
        nonfinite_blocks: (num_segments,) int64, blocks left as they were.
    """

    launch: Launch
    table: Tensor
    nonfinite_blocks: Tensor

    def counts(self) -> Counts:
        """Ask for the numbers of blocks, as they will be where torch's current stream is now."""
        return Counts(self.nonfinite_blocks)


class CudaKernel:
    """The kernel on one GPU."""

    def __init__(self, device: torch.device, backend: str):
        """Compile and load the kernel; raises as `cuda_compile.machine_code` does."""
        code = cuda_compile.machine_code(Gpu.of(device).architecture, backend)
        self._device = device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._driver = Driver()
        with torch.cuda.device(device):
            # The driver works in the context of the thread: a call of the runtime gives it one.
            torch.cuda.synchronize()
            self._functions = _loaded(self._driver, code)
        self._maps: Tensor | None = None

    def step(self, records: np.ndarray, scalars: np.ndarray) -> Launched:
        """Take a step over `kernel.packed` segments, behind the work of torch's current stream.

        Raises:
            ValueError: if the kernel could not rely on a segment; it names the field.
        """
        return self.launch(Launch.of(records, scalars))

    def launch(self, launch: Launch) -> Launched:
        """Launch on torch's current stream."""
        with torch.cuda.device(self._device):
            if launch.uses_maps and self._maps is None:
                self._maps = self._pinned(dynamic_maps().view(np.uint8)).to(self._device)
            table = self._pinned(launch.table).to(self._device, non_blocking=True)
            return self._launched(launch, table)

    def capture(self, before: Launched) -> Launched:
        """Launch as a part of the graph that is being captured.

        Replays do what the table of an earlier launch says by then; nothing is allocated here but
        the counts, which the graph sets to zero first.
        """
        with torch.cuda.device(self._device):
            return self._launched(before.launch, before.table)

    def refresh(self, launch: Launch, captured: Launched) -> None:
        """Overwrite the table of a captured launch, on torch's current stream.

        Args:
            launch: of the same segments, with at most as many scalars.
            captured: what `capture` returned.
        """
        captured.table.record_stream(torch.cuda.current_stream(self._device))
        begin = captured.table[: launch.table.size]
        begin.copy_(self._pinned(launch.table), non_blocking=True)

    def _launched(self, launch: Launch, table: Tensor) -> Launched:
        skipped = torch.zeros(launch.num_segments, dtype=torch.int64, device=self._device)
        base, maps = table.data_ptr(), 0
        if launch.uses_maps:
            assert self._maps is not None, "every launch of such a segment makes them first"
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
        return Launched(launch, table, skipped)

    @staticmethod
    def _pinned(array: np.ndarray) -> Tensor:
        # The host need not wait for a copy of pinned memory; torch keeps it until the copy is done.
        return torch.from_numpy(array).pin_memory()


def _loaded(driver: Driver, code: bytes) -> dict[str, ctypes.c_void_p]:
    try:
        return driver.functions(code, map(kernel_of, ALGORITHMS))
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}; is the driver older than the compiler of the kernel (zero8 doctor names it, "
            "nvidia-smi the CUDA version that the driver serves)?  For CUDA 12: pip install "
            "'zero8[cuda12]' and ZERO8_CUDA_BACKEND=nvrtc"
        ) from error


class Gpu(NamedTuple):
    """A GPU: name, compute capability as one number (9.0 is 90), whether the kernel serves it."""

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
        device: with its number.
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
        For each segment the number of blocks left as they were because a gradient was not finite;
        (num_segments,) int64, on the GPU.

    Raises:
        ValueError: if a tensor has the wrong dtype, device, layout or size, or the GPU is too old.
        RuntimeError: if the kernel cannot be compiled, loaded or launched.
    """
    device = segments[0].param.device
    packed = kernel.packed(segments, device)
    return cuda_kernel(device, backend).step(*packed).nonfinite_blocks
