# SPDX-License-Identifier: Apache-2.0
"""A GPU for tests: the CPU in its place, with a driver that runs the kernel on the host."""

import contextlib
from types import SimpleNamespace

import torch

from zero8.op import cuda, cuda_compile
from zero8.op.kernel import CpuKernel
from zero8.optimizer import plan, stepper


class FakeCuda:
    """Lets parameters on the CPU step as those on a GPU of 3 multiprocessors do.

    Attributes:
        is_on: whether parameters on the CPU are on it.
        compiled: (architecture, backend) of every compilation.
        launches: number of launches.
        is_behind: whether the GPU has not come to what it was asked for since this was set: copies
            to the host have been asked for and are not there.
        is_capturing: whether a CUDA graph is being captured.
        waits: how often the host has waited for the GPU.
    """

    def __init__(self, library, monkeypatch):
        """Put it in the place of torch's CUDA, until the patches are undone."""
        self.compiled: list[tuple[int, str]] = []
        self.is_on = True
        self.is_behind = self.is_capturing = False
        self.waits = self.launches = 0
        processor = SimpleNamespace(name="stand-in", major=9, minor=0, multi_processor_count=3)
        patch = monkeypatch.setattr
        patch(torch.cuda, "get_device_properties", lambda device: processor)
        patch(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
        patch(torch.cuda, "Event", lambda: Event(self))
        patch(torch.cuda, "synchronize", lambda: None)
        patch(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
        patch(cuda, "LIBRARY", str(library))
        patch(cuda_compile, "machine_code", self._machine_code)
        patch(cuda.Driver, "launch", self._launch_of(cuda.Driver.launch))
        for module in (plan, stepper):
            patch(module, "kernel_on", self._kernel_on)
        patch(stepper, "is_capturing", lambda device: self.is_capturing)

    def __enter__(self) -> "FakeCuda":
        cuda.cuda_kernel.cache_clear()
        return self

    def __exit__(self, *_) -> None:
        cuda.cuda_kernel.cache_clear()

    def _kernel_on(self, device: torch.device) -> cuda.Kernel:
        return cuda.cuda_kernel(device) if self.is_on else CpuKernel()

    def _machine_code(self, architecture: int, backend: str) -> bytes:
        self.compiled.append((architecture, backend))
        return b"\x7fELF"

    def _launch_of(self, launch):
        def launched(*call):
            self.launches += 1
            launch(*call)

        return launched


class Event:
    """What `torch.cuda.Event` is to the step."""

    def __init__(self, gpu: FakeCuda):
        self._gpu = gpu

    def record(self) -> None:
        self._was_behind = self._gpu.is_behind

    def query(self) -> bool:
        return not (self._was_behind and self._gpu.is_behind)

    def synchronize(self) -> None:
        self._gpu.waits += self._was_behind and self._gpu.is_behind
        self._was_behind = False
