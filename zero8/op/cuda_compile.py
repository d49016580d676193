# SPDX-License-Identifier: Apache-2.0
"""Compiles the CUDA kernel: with nvcc, or with NVRTC through CuPy where there is no nvcc.

Both make machine code of one architecture, which is kept beside the compiled ops.
"""

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from zero8.op import build, launch, shared_numbers
from zero8.op.locks import locked
from zero8.op.sources import source_folder

BACKENDS = ("auto", "nvcc", "nvrtc")
LOWEST_ARCHITECTURE = 80
"""Compute capability 8.0, the first whose warps reduce integers in one instruction."""

# IEEE arithmetic, operation by operation.
FLAGS = ["-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]
_NVCC_FLAGS = ["-O3", "-Werror", "all-warnings"]


class CudaCompiler(NamedTuple):
    """A way to compile the kernel.

    Attributes:
        name: "nvcc" or "nvrtc".
        version: tells machine code of different compilers apart.
        compile: from a compute capability, such as 90, to machine code.
    """

    name: str
    version: str
    compile: Callable[[int], bytes]


def nvcc() -> str | None:
    """Return the path of nvcc, of CUDA_HOME, PATH or pip's packages; None if there is none."""
    folders = [os.path.join(os.environ["CUDA_HOME"], "bin")] if os.environ.get("CUDA_HOME") else []
    folders += os.environ.get("PATH", os.defpath).split(os.pathsep)
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    folders += map(str, sorted(packages.glob("cu*/bin"), reverse=True))
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def default_backend() -> str:
    """Return ZERO8_CUDA_BACKEND of the environment, else "auto"."""
    return os.environ.get("ZERO8_CUDA_BACKEND") or "auto"


def compiler(backend: str = "auto") -> CudaCompiler:
    """Return the compiler of a backend; "auto" is nvcc if there is one, else NVRTC.

    Raises:
        ValueError: if the backend is unknown.
        RuntimeError: if there is no such compiler; it says what to install.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {list(BACKENDS)}")
    path = None if backend == "nvrtc" else nvcc()
    if path is not None:
        return _nvcc(path)
    if backend == "nvcc":
        raise RuntimeError("nvcc is neither in CUDA_HOME nor on PATH: pip install nvidia-cuda-nvcc")
    return _nvrtc()


@lru_cache(maxsize=4)
def machine_code(architecture: int, backend: str) -> bytes:
    """Return the compiled kernel for a compute capability, such as 90, from the cache if there.

    Processes that start together compile once.

    Raises:
        ValueError: if the backend is unknown, or the architecture too old.
        RuntimeError: if there is no compiler, it fails, or the cache cannot be written to.
    """
    if architecture < LOWEST_ARCHITECTURE:
        raise ValueError(
            f"got a GPU of compute capability {architecture / 10}, expected at least "
            f"{LOWEST_ARCHITECTURE / 10}"
        )
    chosen = compiler(backend)
    path = build.cache_root() / "zero8_cuda" / f"{_key(chosen, architecture)}.cubin"
    if not path.is_file():
        with locked(path.parent.with_suffix(".flock")):
            if not path.is_file():
                path.parent.mkdir(exist_ok=True)
                code = chosen.compile(architecture)
                with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                    file.write(code)
                os.replace(file.name, path)
    return path.read_bytes()


def program() -> Path:
    """Return the path of what is compiled."""
    return source_folder() / "cuda" / "step.cu"


def assertions() -> str:
    """Return what is compiled after it: that its numbers are Python's."""
    launches = {"kPerThread": launch.PER_THREAD, "kWarp": launch.WARP}
    return shared_numbers.assertions("cuda", shared_numbers.shared_numbers() | launches)


def include_folders() -> list[Path]:
    """Return where the kernel's headers are."""
    return [source_folder()]


def nvcc_command(path: str, architectures: list[int]) -> list[str]:
    """Return the beginning of a command line that compiles for some architectures."""
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    include = [f"-I{folder}" for folder in include_folders()]
    return [path, *FLAGS, *_NVCC_FLAGS, *include, *targets]


def _nvcc(path: str) -> CudaCompiler:
    def compile(architecture: int) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            source, result = Path(folder) / "step.cu", Path(folder) / "step.cubin"
            source.write_text(program().read_text() + assertions())
            command = [*nvcc_command(path, [architecture]), "-cubin", source, "-o", result]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(
                    f"{path} failed; ZERO8_CUDA_BACKEND=nvrtc takes CuPy's NVRTC instead:\n"
                    f"{done.stderr or done.stdout}"
                )
            return result.read_bytes()

    version = subprocess.run([path, "--version"], capture_output=True, text=True)
    if version.returncode != 0:
        raise RuntimeError(f"{path} --version failed: {version.stderr or version.stdout}")
    return CudaCompiler("nvcc", version.stdout.strip().splitlines()[-1], compile)


def _nvrtc() -> CudaCompiler:
    try:
        from cupy.cuda import nvrtc

        version = ".".join(map(str, nvrtc.getVersion()))
    except Exception as error:  # CuPy's own, and those of what it looks for NVRTC with
        raise RuntimeError(
            "there is no nvcc, and NVRTC cannot be used through CuPy: pip install 'zero8[cuda]'"
        ) from error

    def compile(architecture: int) -> bytes:
        folders = [*include_folders(), source_folder() / "cuda" / "nvrtc"]
        options = [*FLAGS, f"-arch=sm_{architecture}", *(f"-I{folder}" for folder in folders)]
        options.append("-default-device")  # before 13.5 it takes lambdas for host functions
        source = program().read_text() + assertions()
        compiled = nvrtc.createProgram(source, program().name, (), ())
        try:
            nvrtc.compileProgram(compiled, options)
            return nvrtc.getCUBIN(compiled)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"NVRTC failed:\n{nvrtc.getProgramLog(compiled)}") from error
        finally:
            nvrtc.destroyProgram(compiled)

    return CudaCompiler("nvrtc", version, compile)


def _key(chosen: CudaCompiler, architecture: int) -> str:
    parts = f"{chosen.name} {chosen.version} {architecture} {FLAGS} {assertions()}"
    digest = hashlib.sha256(parts.encode())
    folder = source_folder()
    for path in sorted([*folder.glob("*.h"), *folder.glob("cuda/**/*")]):
        if path.is_file():
            digest.update(path.read_bytes())
    return f"step_sm_{architecture}_{chosen.name}_{digest.hexdigest()[:16]}"
