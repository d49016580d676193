# SPDX-License-Identifier: Apache-2.0
"""Who takes a step over packed segments: the CPU, or the GPU that they are on."""

import numpy as np
import torch

from zero8.op import kernel
from zero8.op.cuda import Counts, Launched, cuda_kernel
from zero8.op.launch import Launch
from zero8.op.threads import step_threads

DEVICES = ("cpu", "cuda")


class CpuRun:
    """A step that the CPU has taken."""

    def __init__(self, nonfinite_blocks: np.ndarray):
        """Take what the kernel has counted: (segments,) blocks left as they were."""
        self._nonfinite_blocks = nonfinite_blocks

    def counts(self) -> "CpuRun":
        """Return the counts, which are here: as `Counts` of a GPU."""
        return self

    def have_arrived(self) -> bool:
        """Return True."""
        return True

    def read(self) -> np.ndarray:
        """Return the numbers."""
        return self._nonfinite_blocks


class CpuRunner:
    """Steps on the CPU, on `step_threads` threads."""

    def __init__(self):
        """Build the op if need be.

        Raises:
            ValueError: if this processor lacks ZERO8_ISA, or a launcher's variable is no number.
        """
        self._isa, self._num_threads = kernel.default_isa(), step_threads()
        kernel.module_for(self._isa)

    def run(self, records: np.ndarray, scalars: np.ndarray) -> CpuRun:
        """Take a step."""
        kernel.run(records, scalars, self._num_threads, self._isa)
        return CpuRun(records["nonfinite_blocks"])


class CudaRun:
    """A step that a GPU takes."""

    def __init__(self, launched: Launched):
        """Take what the launch has left."""
        self.launched = launched
        self.stream: torch.cuda.Stream | None = None

    def counts(self) -> Counts:
        """Return the counts as they will be where `stream`, or torch's current one, is now."""
        with torch.cuda.stream(self.stream):
            return Counts(self.launched.counts)


class CudaRunner:
    """Steps on a GPU, behind the work of torch's current stream; the host does not wait for it."""

    def __init__(self, device: torch.device):
        """Compile the kernel if need be; raises as `cuda_kernel` does."""
        self._kernel = cuda_kernel(device)
        self._device = device

    def run(self, records: np.ndarray, scalars: np.ndarray) -> CudaRun:
        """Take a step."""
        return CudaRun(self._kernel.launch(Launch.of(records, scalars)))

    def capture(self, before: CudaRun) -> CudaRun:
        """Make a step like an earlier one a part of the graph that is being captured.

        Its replays step over what the earlier one did until `refresh` has said something else.
        """
        return CudaRun(self._kernel.capture(before.launched))

    def refresh(self, launch: Launch, captured: CudaRun) -> None:
        """Have the next replay, on torch's current stream, take this step; `CudaKernel.refresh`."""
        self._kernel.refresh(launch, captured.launched)
        captured.stream = torch.cuda.current_stream(self._device)


Run = CpuRun | CudaRun
Runner = CpuRunner | CudaRunner
BlockCounts = CpuRun | Counts


def is_capturing(device: torch.device) -> bool:
    """Return whether what is done on a device now becomes a part of a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # each has a current stream of its own
        return torch.cuda.is_current_stream_capturing()


def runner_on(device: torch.device) -> Runner:
    """Return who steps on a device, one of `DEVICES`; compiles what is not compiled yet.

    Raises:
        ValueError: if ZERO8_ISA or ZERO8_CUDA_BACKEND is not served, or the GPU is too old.
        RuntimeError: if there is no compiler, or it fails.
    """
    return CpuRunner() if device.type == "cpu" else CudaRunner(device)
