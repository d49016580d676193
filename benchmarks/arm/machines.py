# SPDX-License-Identifier: Apache-2.0
"""The instruction sets that are compared, and the programs that each of them needs."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from zero8.bench.usage import UsageError

# The first release with models of Neoverse V1, V2 and Ampere-1.
LEAST_LLVM = 17
LLVM = 19


@dataclass(frozen=True)
class Machine:
    """A target of the op, as it is compiled, emulated and modelled.

    Attributes:
        target: a name in csrc/isa.h.
        triple: of LLVM.
        compiler: a command.
        emulator: a command.
        lanes: floats in a vector.
        root: matches an instruction that takes the square roots of one vector.
        division: the same of divisions.
        models: processors that llvm-mca knows, with the architecture.
    """

    target: str
    triple: str
    compiler: str
    emulator: tuple[str, ...]
    lanes: int
    root: re.Pattern
    division: re.Pattern
    models: tuple[str, ...]


_ARM = ("aarch64-linux-gnu", "aarch64-linux-gnu-g++", ("qemu-aarch64",))
_ARM_MODELS = ("neoverse-v1", "neoverse-v2", "ampere1")
AVX2 = Machine(
    "avx2",
    "x86_64-linux-gnu",
    "g++",
    ("qemu-x86_64", "-cpu", "max"),
    8,
    re.compile(r"vsqrtps\s.*ymm"),
    re.compile(r"vdivps\s.*ymm"),
    ("znver3", "znver4"),
)
NEON = Machine(
    "neon",
    *_ARM,
    4,
    re.compile(r"fsqrt\s+v\d+\.4s"),
    re.compile(r"fdiv\s+v\d+\.4s"),
    _ARM_MODELS,
)
SCALAR = Machine(
    "baseline", *_ARM, 1, re.compile(r"fsqrt\s+s\d"), re.compile(r"fdiv\s+s\d"), _ARM_MODELS
)
MACHINES = {machine.target: machine for machine in (AVX2, NEON, SCALAR)}


def llvm_tool(name: str) -> str:
    """Return the path of a program of LLVM: of release LLVM, or what is on PATH.

    Raises:
        UsageError: if there is none.
    """
    found = shutil.which(f"{name}-{LLVM}") or shutil.which(name)
    if found is None:
        raise UsageError(f"{name} is not on PATH: apt-get install llvm-{LLVM}")
    return found


def check_programs(machines: Sequence[Machine]) -> None:
    """Raise UsageError, which says what to install, if a compiler or an emulator is missing."""
    commands = {one for m in machines for one in (m.compiler, m.emulator[0])}
    if missing := sorted(one for one in commands if shutil.which(one) is None):
        raise UsageError(
            f"not on PATH: {', '.join(missing)}; apt-get install g++-aarch64-linux-gnu qemu-user"
        )
