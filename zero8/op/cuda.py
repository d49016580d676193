# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel, called through the CUDA driver; the kernel of each device.

All that a launch reads is one table in memory.  The host waits for the GPU only when a kernel is
loaded.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from zero8.op import cuda_compile, kernel
from zero8.op.codec_maps import WITH_MAPS, codec_maps
from zero8.op.kernel import BlockCounts, CpuKernel
from zero8.spec.adam import ADAM
from zero8.spec.algorithm import Algorithm
from zero8.spec.algorithms import ALGORITHMS, algorithm_called

DEVICES = ("cpu", "cuda")
LIBRARY = "libcuda.so.1"

# csrc/cuda/team.h
PER_THREAD = 8
WARP = 32
# Smaller thread blocks fit a multiprocessor's registers better; only large blocks need more.
MIN_THREADS = 128


class Driver:
    """The calls of the CUDA driver that a launch needs; torch has made the context."""

    def __init__(self) -> None:
        """Load the driver's library; raises OSError if it is missing."""
        self._library = ctypes.CDLL(LIBRARY)

    def functions(self, code: bytes, names: Iterable[str]) -> dict[str, ctypes.c_void_p]:
        """Load machine code into the current context, permanently; return its kernels by name."""
        module, found = ctypes.c_void_p(), {}
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(code))
        for name in names:
            found[name] = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(found[name]), module, name.encode())
        return found

    def resident_blocks(self, function: ctypes.c_void_p, threads: int) -> int:
        """Return how many thread blocks of a kernel a multiprocessor runs at a time."""
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

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name} failed: {(text.value or b'unknown error').decode()}")


def kernel_of(algorithm: Algorithm) -> str:
    """Return the name of the kernel of an algorithm."""
    return f"zero8_step_{algorithm.kernel.name}"


@dataclass(frozen=True)
class Launch:
    """The arguments of a kernel, without the maps of codecs and the counters."""

    kernel: str  # its name
    table: np.ndarray  # (bytes,) uint8: records, running sums of numbers of blocks, scalars
    first_blocks_at: int  # byte offset in the table
    scalars_at: int
    num_segments: int
    num_blocks: int  # of all segments
    team_threads: int  # threads that share a block
    teams: int  # blocks that a thread block works on at once
    uses_maps: bool  # whether any segment has a codec with maps

    @classmethod
    def of(cls, records: np.ndarray, scalars: np.ndarray) -> "Launch":
        """Return the launch for records of one algorithm; raises ValueError if one is invalid."""
        first_blocks = kernel.first_blocks(records, len(scalars))
        assert not records["copy"].any(), "only the CPU's kernel writes copies"
        numbers = np.unique(records["algorithm"]).tolist() or [ADAM.number]
        (algorithm,) = map(algorithm_called, numbers)
        parts = [part.view(np.uint8) for part in (records, first_blocks, scalars)]
        # Items are multiples of 8 bytes, so everything is aligned.
        assert all(part.nbytes % 8 == 0 for part in parts[:2])
        block_size = int(records["block_size"].max(initial=PER_THREAD * WARP))
        team_threads = block_size // PER_THREAD
        return cls(
            kernel=kernel_of(algorithm),
            table=np.concatenate(parts),
            first_blocks_at=parts[0].nbytes,
            scalars_at=parts[0].nbytes + parts[1].nbytes,
            num_segments=len(records),
            num_blocks=int(first_blocks[-1]),
            team_threads=team_threads,
            teams=max(1, MIN_THREADS // team_threads),
            uses_maps=bool(np.isin(records["moments"]["codec"], WITH_MAPS).any()),
        )

    def grid(self, resident: int) -> int:
        """Return how many thread blocks to launch where `resident` of them run at a time."""
        return max(1, min(resident, -(-self.num_blocks // self.teams)))


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
            try:
                self._functions = self._driver.functions(code, set(map(kernel_of, ALGORITHMS)))
            except RuntimeError as error:
                raise RuntimeError(
                    f"{error}; is the driver older than the kernel's compiler (zero8 doctor names "
                    "the compiler, nvidia-smi the CUDA version of the driver)?  For CUDA 12: pip "
                    "install 'zero8[cuda12]' and set ZERO8_CUDA_BACKEND=nvrtc"
                ) from error
            self._maps = torch.from_numpy(codec_maps().view(np.uint8)).to(device)

    def step(self, records: np.ndarray, scalars: np.ndarray) -> BlockCounts:
        """Take one optimizer step on records, behind the work of torch's current stream."""
        launch = Launch.of(records, scalars)
        block, function = (launch.team_threads, launch.teams), self._functions[launch.kernel]
        with torch.cuda.device(self._device):
            # Copies from and to pinned memory are asynchronous; torch keeps it until they are done.
            pinned = torch.from_numpy(launch.table).pin_memory()
            table = pinned.to(self._device, non_blocking=True)
            counts = torch.zeros(launch.num_segments, dtype=torch.int64, device=self._device)
            arguments = [
                table.data_ptr(),
                table.data_ptr() + launch.first_blocks_at,
                launch.num_segments,
                table.data_ptr() + launch.scalars_at,
                self._maps.data_ptr() if launch.uses_maps else 0,
                counts.data_ptr(),
            ]
            resident = self._driver.resident_blocks(function, block[0] * block[1])
            grid = launch.grid(resident * self._processors)
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._driver.launch(function, grid, block, arguments, stream)
            on_host = torch.empty_like(counts, device="cpu").pin_memory()
            on_host.copy_(counts, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return BlockCounts(on_host.numpy(), copied)


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


@lru_cache(maxsize=64)
def cuda_kernel(device: torch.device, backend: str | None = None) -> CudaKernel:
    """Return the kernel on a GPU, which has an index, compiled and loaded on first use."""
    return CudaKernel(device, backend or cuda_compile.default_backend())


Kernel = CpuKernel | CudaKernel


def kernel_on(device: torch.device) -> Kernel:
    """Return the kernel of a device, one of `DEVICES`; compiles it if needed.

    Raises ValueError for a GPU that is too old, RuntimeError if the kernel cannot be compiled.
    """
    return CpuKernel() if device.type == "cpu" else cuda_kernel(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on torch's current stream of a device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # each device has its own current stream
        return torch.cuda.is_current_stream_capturing()
