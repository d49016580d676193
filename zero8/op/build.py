# SPDX-License-Identifier: Apache-2.0
"""Builds the op with torch's cpp_extension, and loads what has been built.

Every build has a folder of its own in the cache.  The folder's name holds a digest of all that the
build depends on except the compiler, and a mark in it says that the build is complete.  A complete
build never changes, so loading it needs no compiler, no ninja and no lock: the cache may be
read-only, shared between machines, or copied into an image.
"""

import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from types import ModuleType

import torch

from zero8.algorithms.table import ALGORITHMS
from zero8.op import cpp_extension
from zero8.op.locks import ANOTHER_PLACE, locked
from zero8.op.shared_numbers import op_source
from zero8.op.sources import source_folder
from zero8.spec.algorithm import Algorithm
from zero8.spec.codec import CODECS, Codec

NAME = "zero8_adam"

# None of them lets the compiler change a floating-point result.
FLAGS = ("-O3", "-g0", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
LINK_FLAGS = ("-fopenmp",)

_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
TARGETS_OF = {
    "x86_64": {
        "baseline": set(),
        "avx2": _AVX2,
        "avx512": _AVX512,
        "avx512vbmi": _AVX512 | {"avx512vbmi"},
    },
    "aarch64": {"baseline": set(), "neon": {"asimd"}},
}
"""By machine, the instruction sets of csrc/isa.h, slowest first, and the flags they need."""

TARGETS: dict[str, set[str]] = TARGETS_OF.get(platform.machine(), {"baseline": set()})
"""Those of this machine."""

_COMPLETE = "complete"

logger = logging.getLogger("zero8")


@dataclass(frozen=True)
class Extension:
    """A Python module in C++, and its place in the cache.

    Attributes:
        name: the beginning of its folder's name.
        sources: .cpp files; every .h and .cpp beside the first one counts as included.
        seconds: about how long two processors take to compile it.
        generated: the names and texts of more .cpp files.
    """

    name: str
    sources: tuple[Path, ...]
    seconds: int
    generated: tuple[tuple[str, str], ...] = ()

    def folder(self) -> Path:
        """Return the folder of a build of exactly these sources, which may not exist."""
        # The suffix names the Python and the kind of processor.
        parts = [torch.__version__, sysconfig.get_config_var("EXT_SUFFIX"), *FLAGS, *LINK_FLAGS]
        digest = hashlib.sha256(" ".join([*parts, *chain(*self.generated)]).encode())
        beside = self.sources[0].parent
        for path in sorted({*self.sources, *beside.glob("*.h"), *beside.glob("*.cpp")}):
            content = path.read_bytes()
            digest.update(f"\n{path.name} {len(content)}\n".encode() + content)
        return cache_root() / f"{self.name}_{digest.hexdigest()[:16]}"

    def is_built(self) -> bool:
        """Return whether `load` has nothing to compile."""
        return is_complete(self.folder())

    def load(self) -> ModuleType:
        """Return the module; compiles it unless it is built.

        Of processes that start together, one compiles.

        Raises:
            RuntimeError: if there is no compiler, it fails, or the cache cannot be written to.
            ImportError: if a build cannot be loaded on this machine.
        """
        folder = self.folder()
        if not is_complete(folder):
            check_compiler(folder)
        return load_once(folder, folder.name, self.name, self._compile_into)

    def check_loadable(self) -> None:
        """Raise RuntimeError, which says what to install, if it can neither be loaded nor built."""
        if not self.is_built():
            check_compiler(self.folder())

    def written(self, folder: Path) -> list[Path]:
        """Write the generated files into a folder, and return their paths."""
        paths = [folder / name for name, _ in self.generated]
        for path, (_, text) in zip(paths, self.generated, strict=True):
            path.write_text(text)
        return paths

    def _compile_into(self, folder: Path) -> ModuleType:
        # A warning, because Python shows lower levels only after logging has been set up.
        logger.warning(
            "zero8: compiling its CPU kernel once, about %d s; `zero8 build` does it ahead",
            self.seconds,
        )
        module: ModuleType = cpp_extension.imported().load(
            folder.name,
            [str(path) for path in (*self.sources, *self.written(folder))],
            extra_cflags=list(FLAGS),
            extra_ldflags=list(LINK_FLAGS),  # which torch adds to
            extra_include_paths=[str(self.sources[0].parent)],
            build_directory=str(folder),
        )
        return module


def op(machine: str = platform.machine()) -> Extension:
    """Return the op for all targets of a machine, algorithms and codecs."""
    targets = TARGETS_OF.get(machine, TARGETS)
    return _op(NAME, list(product(targets, ALGORITHMS, (None, *CODECS.values()))), seconds=180)


def op_for(target: str, algorithm: Algorithm, codec: Codec) -> Extension:
    """Return the op for one of `TARGETS`, and an algorithm's moments in a codec and in float32."""
    name = f"{NAME}_{target}_{algorithm.kernel.name}_{codec.name}"
    return _op(name, [(target, algorithm, one) for one in (None, codec)], seconds=25)


def _op(name: str, steps: Sequence[tuple[str, Algorithm, Codec | None]], seconds: int) -> Extension:
    # Each file of a target is compiled once per algorithm and codec: in parallel, and only what is
    # needed.
    generated = dict(
        _generated(compiled_target(target, codec), algorithm, codec)
        for target, algorithm, codec in steps
    )
    generated["numbers.cpp"] = op_source()
    shared = [path for path in source_folder().glob("*.cpp") if not path.match("step_*")]
    return Extension(name, tuple(sorted(shared)), seconds, tuple(generated.items()))


def compiled_target(target: str, codec: Codec | None) -> str:
    """Return the target whose code a target's steps with a codec are, as in csrc/dispatch.cpp.

    Args:
        target: one of `TARGETS`.
        codec: that of the moments, None if they are in float32.
    """
    # Permutations of bytes look up the maps of `dynamic`; no other codec has a use for them.
    if target == "avx512vbmi" and codec is not CODECS["dynamic"]:
        return "avx512"
    return target


def _generated(target: str, algorithm: Algorithm, codec: Codec | None) -> tuple[str, str]:
    """Return the name and the text of the file that has these steps."""
    kernel, moments = algorithm.kernel.name, "float32" if codec is None else codec.name
    text = (
        f"#define ZERO8_ALGORITHM {kernel.capitalize()}\n"
        f"#define ZERO8_CODEC {moments.capitalize()}\n"
        f'#include "step_{target}.cpp"\n'
    )
    return f"step_{target}_{kernel}_{moments}.cpp", text


def op_for_steps(algorithm: Algorithm, codec: Codec) -> Extension:
    """Return the op for all steps if it is built, else for these ones on this processor."""
    whole = op()
    return whole if whole.is_built() else op_for(target_of_steps(), algorithm, codec)


def target_of_steps() -> str:
    """Return ZERO8_ISA of the environment if this processor has it, else the fastest target."""
    served, chosen = served_targets(), os.environ.get("ZERO8_ISA")
    return chosen if chosen in served else served[-1]


def served_targets() -> list[str]:
    """Return the targets whose code this processor can run, slowest first."""
    flags = processor_flags()
    return [target for target, needed in TARGETS.items() if needed <= flags]


def processor_flags() -> set[str]:
    """Return the processor's flags from /proc/cpuinfo, none if there is no such file.

    They only guess what to compile: the op asks the processor which code to run.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    # On ARM the line is called Features.
    found = (line for line in lines if line.startswith(("flags", "Features")))
    return set(next(found, "").partition(":")[2].split())


def cache_root() -> Path:
    """Return the folder of all builds: TORCH_EXTENSIONS_DIR of the environment, else torch's."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen).absolute()
    return Path(cpp_extension.imported().get_default_build_root())


def compiler() -> str | None:
    """Return the path of the C++ compiler that builds the op, None if there is none."""
    # CXX may hold a launcher and options too: "ccache g++".
    return shutil.which(_cxx().partition(" ")[0])


def _cxx() -> str:
    compiler: str = cpp_extension.imported().get_cxx_compiler()
    return compiler


def ninja() -> str | None:
    """Return the path of ninja: where pip puts it, or on PATH; None if there is none."""
    return shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")


def is_complete(folder: Path) -> bool:
    """Return whether this folder holds a complete build."""
    return (folder / _COMPLETE).is_file()


def check_compiler(folder: Path) -> None:
    """Raise RuntimeError, which says what is missing, if this folder cannot be built here."""
    if sys.platform != "linux":
        raise RuntimeError(
            f"the CPU kernel is built on Linux alone, this is {sys.platform}: it needs OpenMP as "
            "GCC has it, and thread affinity; use Linux, or a Linux container"
        )
    if compiler() is None:
        raise RuntimeError(
            f"no C++ compiler ({_cxx()!r} is not on PATH), and {folder} is not built "
            "(TORCH_EXTENSIONS_DIR chooses the place): install a compiler (Debian and Ubuntu: "
            "apt-get install g++), set CXX, or copy a folder that `zero8 build --into` has made"
        )


def load_once(
    folder: Path, name: str, lock: str, compile_into: Callable[[Path], ModuleType]
) -> ModuleType:
    """Return the module of a folder; compiles it if needed, in one process at a time.

    Args:
        folder: the build's folder, whose name has a digest of all that the build depends on.
        name: the module's name.
        lock: the name of the lock file beside the folder, without its ending.
        compile_into: compiles the module into an empty folder and returns it.

    Raises:
        RuntimeError: if it cannot be compiled, or the cache cannot be written to.
        ImportError: if a build cannot be loaded on this machine.
    """
    library = folder / f"{name}.so"
    if is_complete(folder):
        return _imported(library)
    with locked(folder.with_name(f"{lock}.flock")), own_ninja_first():
        if not is_complete(folder):
            return _compiled(folder, name, compile_into)
        return _imported(library)


def _compiled(folder: Path, name: str, compile_into: Callable[[Path], ModuleType]) -> ModuleType:
    if folder.exists():
        _discard(folder)
    folder.mkdir()
    # torch renames modules that a process builds again, and does not retry failed builds.
    cpp_extension.imported().JIT_EXTENSION_VERSIONER.entries.pop(name, None)
    try:
        module = compile_into(folder)
    except (RuntimeError, subprocess.SubprocessError) as error:  # the disk may be full
        raise RuntimeError(f"{folder} ({ANOTHER_PLACE}): {error}") from error
    (folder / _COMPLETE).touch()
    return module


def _imported(library: Path) -> ModuleType:
    try:
        spec = importlib.util.spec_from_file_location(library.stem, library)
        assert spec is not None and spec.loader is not None, f"{library} is no extension module"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ImportError(f"{error}; remove {library.parent} to have it built again") from error
    return module


def _discard(folder: Path) -> None:
    """Move the remains of a killed build to another folder, and remove them.

    Its compilers may still be writing, and then do so in the moved folder.
    """
    grave = tempfile.mkdtemp(prefix=f"{folder.name}.killed.", dir=folder.parent)
    shutil.rmtree(folder.rename(grave), ignore_errors=True)


@contextmanager
def own_ninja_first() -> Iterator[None]:
    """Put the ninja of this Python first on PATH.

    pip puts it beside the interpreter, which is on PATH only in an activated environment.  Another
    version of ninja would rebuild everything.
    """
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), path))
    try:
        yield
    finally:
        os.environ["PATH"] = path
