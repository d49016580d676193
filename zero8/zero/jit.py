# SPDX-License-Identifier: Apache-2.0
"""Builds DeepSpeed's ops as ours: once, in a folder per version, under our lock.

DeepSpeed has torch build all versions of an op in one folder.  There, a killed build leaves a lock
that later runs wait for endlessly, another ninja or virtual environment compiles everything again,
and hosts that share the folder load an op compiled for one host's processor.  Here the folder's
name is a hash of the sources, the flags, torch, Python and, for flags that say "native", the
processor.
"""

import hashlib
import json
import logging
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import ModuleType

import torch

from zero8.op import build

BUILDS = "OpBuilder.jit_load"

# Approximate compile times on two processors.
SECONDS = {
    "cpu_adam": 45,
    "pin_memory": 45,
    "async_io": 120,
    "deepspeed_shm_comm": 70,
}

logger = logging.getLogger("zero8")


def build_once(op_builder: type) -> None:
    """Have all builders of this base class build once.  Idempotent."""
    original = op_builder.jit_load
    if original.__globals__ is globals():
        return

    @wraps(original)
    def jit_load(self, verbose=True):
        # torch requires a ninja on PATH.
        with build.own_ninja_first(), _loads_by(partial(_load, self.name)):
            return original(self, verbose)

    op_builder.jit_load = jit_load


@contextmanager
def _loads_by(load: Callable[..., ModuleType]) -> Iterator[None]:
    """Replace torch's `load` by `load`, which gets torch's function and its arguments."""
    from torch.utils import cpp_extension

    real = cpp_extension.load
    cpp_extension.load = partial(load, real)
    try:
        yield
    finally:
        cpp_extension.load = real


def _load(op: str, real: Callable[..., ModuleType], *others, **arguments) -> ModuleType:
    """Return the module that torch's `load` (`real`) returns for these arguments, built once."""
    name = arguments.get("name")
    if name != op:  # a call by another thread
        return real(*others, **arguments)
    folder = _folder(**arguments)
    if not build.is_complete(folder) and build.compiler() is None:
        if _is_built_by_deepspeed(name):
            return real(**arguments)
        build.check_compiler(folder)

    def compile_into(folder: Path) -> ModuleType:
        usual = f", about {SECONDS[name]} s" if name in SECONDS else ""
        logger.warning(
            "zero8: compiling DeepSpeed's op %s once%s; `zero8 build CONFIG` does it ahead",
            name,
            usual,
        )
        return real(**arguments, build_directory=str(folder))

    return build.load_once(folder, name, name, compile_into)


def _is_built_by_deepspeed(name: str) -> bool:
    """Return whether torch has a finished build of this op, usable without a compiler."""
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    return (folder / f"{name}.so").is_file() and not (folder / "lock").exists()


def _folder(
    name: str, sources: list[str], extra_include_paths: list[str], verbose: bool, **flags
) -> Path:
    """Return the folder of a build from these sources with these flags."""
    settings = json.dumps(flags, sort_keys=True)
    parts = [torch.__version__, sysconfig.get_config_var("EXT_SUFFIX"), settings]
    if "native" in settings:
        parts += sorted(build.processor_flags())
    digest = hashlib.sha256(" ".join(parts).encode())
    for path in _files(sources, extra_include_paths):
        content = path.read_bytes()
        digest.update(f"\n{path.name} {len(content)}\n".encode() + content)
    return build.cache_root() / f"{name}_{digest.hexdigest()[:16]}"


def _files(sources: list[str], include_paths: list[str]) -> list[Path]:
    """Return the sources and DeepSpeed's headers for them.

    The headers of toolkits such as CUDA are left out: torch's version implies theirs.
    """
    import deepspeed  # here, because this module is imported during DeepSpeed's import

    package = Path(deepspeed.__file__).parent
    paths = [Path(source) for source in sources]
    headers = {header for path in paths for header in path.parent.rglob("*.*h")}  # .h and .cuh
    for include in map(Path, include_paths):
        if include.is_relative_to(package):
            headers.update(include.glob("*.*h"))
    return paths + sorted(headers)
