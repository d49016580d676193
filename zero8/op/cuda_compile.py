# SPDX-License-Identifier: Apache-2.0
"""Compiles the CUDA kernel: with nvcc, or with NVRTC through CuPy if there is no nvcc.

Both make machine code for one architecture, which is cached beside the op of the CPU.
"""

import os
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from zero8.op import build

BACKENDS = ("auto", "nvcc", "nvrtc")
LOWEST_ARCHITECTURE = 80
"""Compute capability 8.0, the first whose warps reduce integers in one instruction."""

# IEEE arithmetic, operation by operation.
FLAGS = ["-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]
_NVCC_FLAGS = [*FLAGS, "-O3"]
# Without the last one, NVRTC before 13.5 compiles lambdas for the host.
_NVRTC_FLAGS = [*FLAGS, "-default-device"]


class CudaCompiler(NamedTuple):
    """A way to compile the kernel, for a compute capability, such as 90, to machine code."""

    name: str  # "nvcc" or "nvrtc"
    version: str
    compile: Callable[[int], bytes]


def program() -> Path:
    """Return the path of the CUDA source."""
    return build.source_folder() / "cuda" / "step.cu"


def nvcc() -> str | None:
    """Return the path of nvcc in CUDA_HOME, PATH, pip's folder or CUDA's usual one, else None."""
    folders = [os.path.join(os.environ["CUDA_HOME"], "bin")] if os.environ.get("CUDA_HOME") else []
    folders += os.environ.get("PATH", os.defpath).split(os.pathsep)
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    folders += map(str, sorted(packages.glob("cu*/bin"), reverse=True))
    folders.append("/usr/local/cuda/bin")  # CUDA's own installer does not put it on PATH
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def default_backend() -> str:
    """Return ZERO8_CUDA_BACKEND of the environment, else "auto"."""
    return os.environ.get("ZERO8_CUDA_BACKEND") or "auto"


def compiler(backend: str) -> CudaCompiler:
    """Return the compiler of a backend; "auto" is nvcc if there is one, else NVRTC.

    Raises RuntimeError, which says what to install, if there is no such compiler.
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
    """Return the compiled kernel for a compute capability, such as 90, from the cache if possible.

    Of processes that start together, one compiles.  Cached code needs no compiler.  Raises
    ValueError if the architecture is too old, RuntimeError if the kernel cannot be compiled.
    """
    if architecture < LOWEST_ARCHITECTURE:
        raise ValueError(
            f"got a GPU of compute capability {architecture / 10}, expected at least "
            f"{LOWEST_ARCHITECTURE / 10}"
        )
    folder = build.cache_root() / "zero8_cuda"
    sources = build.source_folder()
    found = filter(Path.is_file, [*sources.glob("*.h"), *sources.glob("cuda/**/*")])
    digest = build.digest_of(sorted(found), f"{_NVCC_FLAGS} {_NVRTC_FLAGS}")
    name = f"step_sm_{architecture}_{digest}"
    try:
        chosen = compiler(backend)
    except RuntimeError:
        made = folder.glob(f"{name}_{'' if backend == 'auto' else backend}*.cubin")
        if path := next(iter(sorted(made)), None):
            return path.read_bytes()
        raise
    version = re.sub(r"\W+", "-", chosen.version)
    path = folder / f"{name}_{chosen.name}_{version}.cubin"
    if not path.is_file():
        with build.locked(folder.with_suffix(".flock")):
            if not path.is_file():
                folder.mkdir(exist_ok=True)
                code = chosen.compile(architecture)
                with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                    file.write(code)
                os.chmod(file.name, 0o644)  # for all users
                os.replace(file.name, path)
    return path.read_bytes()


def nvcc_command(path: str, architecture: int, *options: str) -> list[str]:
    """Return the command line that compiles the kernel for an architecture."""
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    folder = f"-I{build.source_folder()}"
    return [path, *_NVCC_FLAGS, folder, target, *options, str(program())]


def _nvcc(path: str) -> CudaCompiler:
    advice = "ZERO8_CUDA_BACKEND=nvrtc uses CuPy's NVRTC instead"

    def compile(architecture: int) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "step.cubin"
            command = nvcc_command(path, architecture, "-cubin", "-o", str(result))
            build.output_of(command, advice)
            return result.read_bytes()

    version = build.output_of([path, "--version"], advice)
    return CudaCompiler("nvcc", version.strip().splitlines()[-1], compile)


def _nvrtc() -> CudaCompiler:
    try:
        from cupy.cuda import nvrtc

        version = ".".join(map(str, nvrtc.getVersion()))
    except Exception as error:  # from CuPy, or from its search for NVRTC
        raise RuntimeError(
            "there is no nvcc, and NVRTC cannot be used through CuPy: pip install 'zero8[cuda]', "
            "or 'zero8[cuda12]' if the driver supports CUDA 12 only"
        ) from error

    def compile(architecture: int) -> bytes:
        folders = [build.source_folder(), build.source_folder() / "cuda" / "nvrtc"]
        options = [*_NVRTC_FLAGS, f"-arch=sm_{architecture}", *(f"-I{one}" for one in folders)]
        compiled = nvrtc.createProgram(program().read_text(), program().name, (), ())
        try:
            nvrtc.compileProgram(compiled, options)
            code: bytes = nvrtc.getCUBIN(compiled)
            return code
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"NVRTC failed:\n{nvrtc.getProgramLog(compiled)}") from error
        finally:
            nvrtc.destroyProgram(compiled)

    return CudaCompiler("nvrtc", version, compile)
