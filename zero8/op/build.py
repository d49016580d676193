# SPDX-License-Identifier: Apache-2.0
"""Loads the CPU kernel: the binary of a wheel, or else one that is compiled here once.

A checkout has no binary, and ZERO8_BUILD=1 asks for a build where there is one.  A build has a
folder of its own, named by a digest of all that it depends on except the compiler, which appears
when the build is complete and never changes.  So loading needs neither compiler nor lock: the cache
may be read-only, shared or copied.  Nor does a process that is killed while it compiles leave a
lock behind, as builds by torch.utils.cpp_extension do.
"""

import ctypes
import hashlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from zero8.environment import flock

NAME = "zero8_kernel"

_ANOTHER_PLACE = "TORCH_EXTENSIONS_DIR chooses another place"
_PACKAGE = Path(__file__).resolve().parents[1]

INSTALLED = Path(__file__).with_name(f"{NAME}.abi3.so")
"""The binary of a wheel."""

logger = logging.getLogger("zero8")


def source_folder() -> Path:
    """Return the folder of the C++ sources: inside the package in a wheel, else beside it."""
    inside = _PACKAGE / "csrc"
    return inside if inside.is_dir() else _PACKAGE.parent / "csrc"


def sources() -> list[Path]:
    """Return the C++ files, those for other processors too."""
    return sorted(source_folder().glob("*.cpp"))


def flags() -> list[str]:
    """Return the compiler's options, none of which lets it change a floating-point result."""
    return (source_folder() / "flags.txt").read_text().split()


def cache_root() -> Path:
    """Return the folder of all builds: TORCH_EXTENSIONS_DIR of the environment, else torch's."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torch_extensions"


def library() -> Path:
    """Return the path of the wheel's binary, else of a build of these sources, made or not yet."""
    if INSTALLED.is_file() and os.environ.get("ZERO8_BUILD", "0") == "0":
        return INSTALLED
    paths = [source_folder() / "flags.txt", *sources(), *sorted(source_folder().glob("*.h"))]
    # The suffix names the Python and the kind of processor.
    digest = digest_of(paths, sysconfig.get_config_var("EXT_SUFFIX"))
    return cache_root() / f"{NAME}_{digest}" / f"{NAME}.so"


def digest_of(sources: Iterable[Path], settings: str) -> str:
    """Return a short digest of files and of the settings with which they are compiled."""
    digest = hashlib.sha256(settings.encode())
    for path in sources:
        content = path.read_bytes()
        digest.update(f"\n{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def load() -> ModuleType:
    """Return the module; compiles it unless it is there.

    Of processes that start together, one compiles.  Raises RuntimeError if the module cannot be
    compiled, ImportError if it cannot be loaded.
    """
    path = library()
    if not path.is_file():
        if compiler() is None:
            raise RuntimeError(
                f"no C++ compiler ({_cxx()[0]!r} is not on PATH), and {path} is not built: install "
                "a wheel of zero8, or a compiler (Debian and Ubuntu: apt-get install g++), or set "
                "CXX"
            )
        with locked(cache_root() / f"{NAME}.flock"):
            if not path.is_file():
                _build(path.parent)
    try:
        return _imported(path)
    except ImportError as error:
        again = "reinstall zero8" if path == INSTALLED else f"remove {path.parent} to build again"
        raise ImportError(f"{error}; {again}") from error


def compiler() -> str | None:
    """Return the path of the C++ compiler that would build the op, None if there is none."""
    return shutil.which(_cxx()[0])


def _cxx() -> list[str]:
    # It may hold a launcher and options too: "ccache g++".
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a build; a process that waits logs the holder.

    Raises RuntimeError where a file cannot be written, the lock's or one within the block.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with flock.opened(path) as file:
            if not flock.take(file):
                logger.warning(
                    "zero8: waits for %s, which has locked %s to build. This process goes on when "
                    "that one ends, even if it is killed. If it is gone already (the server of a "
                    "network file system can keep the lock of a dead host), remove that file and "
                    "start again",
                    flock.holder(file),
                    path,
                )
                flock.take(file, waits=True)
            yield
    except OSError as error:
        raise RuntimeError(f"{path.parent} ({_ANOTHER_PLACE}): {error}") from error


def _build(folder: Path) -> None:
    """Compile into another folder, which gets its name when it is complete."""
    logger.warning("zero8: compiling its CPU kernel once, a minute; wheels have it compiled")
    for remains in folder.parent.glob(f"{folder.name}*"):  # of builds that were killed
        shutil.rmtree(remains, ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        _compile_into(making)
        making.chmod(0o755)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _compile_into(folder: Path) -> None:
    """Compile the sources, several at a time, and link the library; raises RuntimeError."""
    include = [f"-I{path}" for path in (source_folder(), sysconfig.get_path("include"))]

    def compiled(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        output_of([*_cxx(), *flags(), *include, "-c", str(source), "-o", made], _ANOTHER_PLACE)
        return made

    # The steps take longest.
    longest_first = sorted(sources(), key=lambda path: not path.stem.startswith("step_"))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, longest_first))
    output_of([*_cxx(), "-shared", *objects, "-o", str(folder / f"{NAME}.so")], _ANOTHER_PLACE)


def output_of(command: list[str], advice: str) -> str:
    """Return what a compiler prints; raise RuntimeError with the advice if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed ({advice}):\n{done.stderr or done.stdout}")
    return done.stdout


def _share_openmp() -> None:
    """Let the kernel find the OpenMP runtime that torch has loaded.

    torch's packages for ARM load it for themselves alone.
    """
    with open("/proc/self/maps") as maps:
        paths = {line[line.index("/") :].rstrip("\n") for line in maps if "/" in line}
    found = [path for path in paths if re.match(r"lib(gomp|omp|iomp5)\b", Path(path).name)]
    for path in sorted(found, key=lambda path: "torch" not in path)[:1]:
        ctypes.CDLL(path, mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD)


def _imported(path: Path) -> ModuleType:
    _share_openmp()
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None, f"{path} is no extension module"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
