# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel compiled for the host (host_kernel.cpp), called as a GPU would be."""

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import kernel_steps
import numpy as np
import torch
from places import ROOT, SUPPORT
from torch.utils import cpp_extension

from zero8.op.codec_maps import codec_maps
from zero8.op.cuda import Launch
from zero8.spec.segment import Segment

FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared"]
# Allowed are pragmas of CUDA.
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]


class Host:
    """The kernel, and its single operations."""

    def __init__(self, folder: Path):
        """Load the kernel from a folder, and compile it first if it is not there."""
        self.path = path = folder / "host_kernel.so"
        if not path.exists():
            self._compile(path)
        self.library = ctypes.CDLL(str(path))

    @staticmethod
    def _compile(path: Path) -> None:
        command = [*cpp_extension.get_cxx_compiler().split(), *FLAGS, *WARNINGS]
        command += [f"-I{ROOT / 'csrc'}", SUPPORT / "host_kernel.cpp", "-o", path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr

    def launch(self, launch: Launch, first_blocks=None, grid=3, backwards=False) -> list[int]:
        """Run a launch; return for each segment the blocks that were left as they were."""
        base = launch.table.ctypes.data
        skipped = np.zeros(launch.num_segments, np.uint64)
        if first_blocks is None:
            first_blocks = base + launch.first_blocks_at
        maps = codec_maps().ctypes.data if launch.uses_maps else 0
        arguments = [base, first_blocks, launch.num_segments, base + launch.scalars_at, maps]
        pointers = [ctypes.c_void_p(address) for address in (*arguments, skipped.ctypes.data)]
        pointers[2] = ctypes.c_int64(launch.num_segments)
        shape = launch.team_threads, launch.teams, launch.grid(grid)
        error = self.library.zero8_step_launch(*pointers, *shape, ctypes.c_void_p(backwards))
        assert error == 0, "threads wait for each other in vain"
        return skipped.tolist()

    def step(self, segments: Sequence[Segment], **options) -> list[int]:
        """Take one step on every segment, in one launch."""
        return self.launch(Launch.of(*kernel_steps.packed(segments)), **options)

    def operations(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
        """Return a * b, a / b and a * b + c, as the kernel makes them."""
        results = [torch.empty_like(a) for _ in range(3)]
        addresses = [ctypes.c_void_p(x.data_ptr()) for x in (a, b, c, *results)]
        count = ctypes.c_int64(a.numel())
        self.library.zero8_operations(*addresses[:3], count, *addresses[3:])
        return results
