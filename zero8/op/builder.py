# SPDX-License-Identifier: Apache-2.0
"""Builds the op through DeepSpeed's JIT op builder: the CPU's code, and the CUDA kernel."""

import fcntl
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepspeed.ops.op_builder.builder import CUDAOpBuilder
from torch.utils import cpp_extension

from zero8.op import cuda_compile
from zero8.op.sources import source_folder


class Zero8AdamBuilder(CUDAOpBuilder):
    """The `zero8_adam` row of ds_report: the fused 8-bit step, on the CPU and on GPUs.

    One binary holds the code for several instruction sets and chooses when it runs, so a home
    directory that machines with different processors share is safe (no -march=native).

    The CUDA kernel is compiled apart from it, once a GPU is to step: whoever offloads needs no
    nvcc, and as it needs neither torch's headers nor its libraries, an nvcc of another version than
    torch's CUDA will do.
    """

    NAME = "zero8_adam"
    BUILD_VAR = "DS_BUILD_ZERO8_ADAM"

    def __init__(self):
        """Register under `NAME`, the name of the build folder too."""
        super().__init__(name=self.NAME)

    @property
    def build_for_cpu(self) -> bool:
        """Whether the extension of torch has no CUDA in it: always."""
        return True

    @build_for_cpu.setter
    def build_for_cpu(self, _: bool) -> None:
        """Leave it so: DeepSpeed sets it to whether there is no GPU."""

    def absolute_name(self) -> str:
        """Return where a prebuilt module would be imported from."""
        return f"zero8.op.{self.NAME}"

    def sources(self) -> list[str]:
        """Return the absolute paths of the C++ sources."""
        targets = ("baseline", "avx2", "avx512", "avx512vbmi")
        names = [
            "binding",
            "check",
            "dispatch",
            "stream",
            *(f"step_{target}" for target in targets),
        ]
        return [str(source_folder() / f"{name}.cpp") for name in names]

    def include_paths(self) -> list[str]:
        """Return the absolute path of the headers."""
        return [str(source_folder())]

    def cxx_args(self) -> list[str]:
        """Return the flags: none of them lets the compiler change a floating-point result."""
        return [
            "-O3",
            "-g0",
            "-fopenmp",
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fno-trapping-math",
        ]

    def extra_ldflags(self) -> list[str]:
        """Return the linker flags."""
        return ["-fopenmp"]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether a C++ compiler is there; if not, say what to install."""
        if compiler() is None:
            self.error_log = (
                f"no C++ compiler: {cpp_extension.get_cxx_compiler()!r} is not on PATH; install "
                "one (Debian and Ubuntu: apt-get install g++) or set CXX"
            )
            if verbose:
                self.warning(self.error_log)
            return False
        return super().is_compatible(verbose)

    def load(self, verbose: bool = False):
        """Build the op if its sources changed, and return the module.

        Processes that start together build once: the first takes a file lock, which the operating
        system releases however the process ends, and the others wait for it.
        """
        if self.name in self._loaded_ops:
            return self._loaded_ops[self.name]
        with build_lock(self.name):
            return super().load(verbose)

    def cuda_code(self, architecture: int, backend: str) -> bytes:
        """Return the CUDA kernel's machine code, compiled now unless that has been done before.

        Processes that start together compile once.

        Args:
            architecture: compute capability of the GPU, such as 90.
            backend: "nvcc", "nvrtc" (through CuPy), or "auto": nvcc where there is one.

        Raises:
            ValueError: if the backend is unknown, or the architecture too old.
            RuntimeError: if there is no compiler, or it fails.
        """
        with build_lock(f"{self.name}_cuda"):
            return cuda_compile.machine_code(architecture, backend)


def compiler() -> str | None:
    """Return the path of the C++ compiler that builds the op, None if there is none."""
    # CXX may hold a launcher and options too: "ccache g++".
    return shutil.which(cpp_extension.get_cxx_compiler().partition(" ")[0])


def ninja() -> str | None:
    """Return the path of ninja: where pip puts it, or on PATH; None if there is none."""
    return shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")


@contextmanager
def _own_ninja_first() -> Iterator[None]:
    # pip puts ninja beside the interpreter, which only an activated environment has on PATH.
    # Always the same ninja: another version does not trust the log of this one and builds anew.
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), path))
    try:
        yield
    finally:
        os.environ["PATH"] = path


@contextmanager
def build_lock(name: str) -> Iterator[None]:
    """Be the only process that builds the op `name`, whatever killed builds have left behind.

    Works for DeepSpeed's own ops too, among processes that use it.
    """
    build_folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    with open(build_folder.with_name(f"{name}.flock"), "w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        # torch's own lock is a file that a killed build leaves behind and the next one waits for
        # without end.  The compilers of that build may still be writing: they take their folder
        # with them.
        if (build_folder / "lock").exists():
            grave = tempfile.mkdtemp(prefix=f"{name}.killed.", dir=build_folder.parent)
            shutil.rmtree(build_folder.rename(grave), ignore_errors=True)
        with _own_ninja_first():
            yield
