# SPDX-License-Identifier: Apache-2.0
"""Compiles the CUDA kernel: with nvcc, or with NVRTC through CuPy if there is no nvcc.

Both make machine code for one architecture, which is cached beside the compiled ops.
"""

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from zero8.op import build

BACKENDS = ("auto", "nvcc", "nvrtc")
LOWEST_ARCHITECTURE = 80
"""Compute capability 8.0, the first whose warps reduce integers in one instruction."""

USUAL_FOLDER = "/usr/local/cuda/bin"
"""Where CUDA's own installer puts nvcc, which it does not put on PATH."""

# IEEE arithmetic, operation by operation.
FLAGS = ["-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]
# Options of each compiler; without its option, NVRTC before 13.5 compiles lambdas for the host.
_OWN_FLAGS = {"nvcc": ["-O3"], "nvrtc": ["-default-device"]}


class CudaCompiler(NamedTuple):
    """A way to compile the kernel.

    Attributes:
        name: "nvcc" or "nvrtc".
        version: its version, which is a part of cached files' names.
        compile: maps a compute capability, such as 90, to machine code.
    """

    name: str
    version: str
    compile: Callable[[int], bytes]


def nvcc() -> str | None:
    """Return the path of nvcc in CUDA_HOME, PATH, pip's folder or CUDA's usual one, else None."""
    folders = [os.path.join(os.environ["CUDA_HOME"], "bin")] if os.environ.get("CUDA_HOME") else []
    folders += os.environ.get("PATH", os.defpath).split(os.pathsep)
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    folders += map(str, sorted(packages.glob("cu*/bin"), reverse=True))
    folders.append(USUAL_FOLDER)
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def default_backend() -> str:
    """Return ZERO8_CUDA_BACKEND of the environment, else "auto"."""
    return os.environ.get("ZERO8_CUDA_BACKEND") or "auto"


def compiler(backend: str = "auto") -> CudaCompiler:
    """Return the compiler of a backend; "auto" is nvcc if there is one, else NVRTC.

    Raises:
        ValueError: if the backend is unknown.
        RuntimeError: if there is no such compiler; the message says what to install.
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

    Of processes that start together, one compiles.  Cached code needs no compiler.

    Raises:
        ValueError: if the backend is unknown, or the architecture too old.
        RuntimeError: if there is no compiler, it fails, or the cache cannot be written to.
    """
    if architecture < LOWEST_ARCHITECTURE:
        raise ValueError(
            f"got a GPU of compute capability {architecture / 10}, expected at least "
            f"{LOWEST_ARCHITECTURE / 10}"
        )
    folder = build.cache_root() / "zero8_cuda"
    name = f"step_sm_{architecture}_{_digest_of_sources()}"
    try:
        chosen = compiler(backend)
    except RuntimeError:
        made = folder.glob(f"{name}_{'' if backend == 'auto' else backend}*.cubin")
        if path := next(iter(sorted(made)), None):
            return path.read_bytes()
        raise
    path = folder / f"{name}_{chosen.name}_{_digest_of(chosen)}.cubin"
    if not path.is_file():
        with build.locked(folder.with_suffix(".flock")):
            if not path.is_file():
                folder.mkdir(exist_ok=True)
                _write(path, _compiled(chosen, architecture, backend))
    return path.read_bytes()


def _compiled(chosen: CudaCompiler, architecture: int, backend: str) -> bytes:
    """Return the compiled kernel; "auto" falls back to NVRTC if nvcc fails."""
    try:
        return chosen.compile(architecture)
    except RuntimeError as error:
        if backend != "auto" or chosen.name == "nvrtc":
            raise
        try:
            code = _nvrtc().compile(architecture)
        except RuntimeError:
            raise error from None
        warnings.warn(f"zero8: NVRTC has compiled the CUDA kernel, as {error}", stacklevel=2)
        return code


def _write(path: Path, code: bytes) -> None:
    """Write a file of the cache atomically, readable by all users."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(code)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def program() -> Path:
    """Return the path of the CUDA source."""
    return build.source_folder() / "cuda" / "step.cu"


def include_folders() -> list[Path]:
    """Return the folders of the kernel's headers."""
    return [build.source_folder()]


def nvcc_command(path: str, architectures: list[int]) -> list[str]:
    """Return the beginning of a command line that compiles for some architectures."""
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    include = [f"-I{folder}" for folder in include_folders()]
    return [path, *FLAGS, *_OWN_FLAGS["nvcc"], *include, *targets]


def _nvcc(path: str) -> CudaCompiler:
    def compile(architecture: int) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            source, result = Path(folder) / "step.cu", Path(folder) / "step.cubin"
            source.write_text(program().read_text())
            files = ["-cubin", str(source), "-o", str(result)]
            command = [*nvcc_command(path, [architecture]), *files]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(
                    f"{path} failed; ZERO8_CUDA_BACKEND=nvrtc uses CuPy's NVRTC instead:\n"
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
    except Exception as error:  # from CuPy, or from its search for NVRTC
        raise RuntimeError(
            "there is no nvcc, and NVRTC cannot be used through CuPy: pip install 'zero8[cuda]', "
            "or 'zero8[cuda12]' if the driver supports CUDA 12 only"
        ) from error

    def compile(architecture: int) -> bytes:
        folders = [*include_folders(), build.source_folder() / "cuda" / "nvrtc"]
        options = [*FLAGS, *_OWN_FLAGS["nvrtc"], f"-arch=sm_{architecture}"]
        options += [f"-I{folder}" for folder in folders]
        source = program().read_text()
        compiled = nvrtc.createProgram(source, program().name, (), ())
        try:
            nvrtc.compileProgram(compiled, options)
            code: bytes = nvrtc.getCUBIN(compiled)
            return code
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"NVRTC failed:\n{nvrtc.getProgramLog(compiled)}") from error
        finally:
            nvrtc.destroyProgram(compiled)

    return CudaCompiler("nvrtc", version, compile)


def _digest_of_sources() -> str:
    digest = hashlib.sha256(f"{FLAGS}".encode())
    folder = build.source_folder()
    for path in sorted([*folder.glob("*.h"), *folder.glob("cuda/**/*")]):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _digest_of(chosen: CudaCompiler) -> str:
    parts = f"{chosen.version} {_OWN_FLAGS[chosen.name]}"
    return hashlib.sha256(parts.encode()).hexdigest()[:8]
