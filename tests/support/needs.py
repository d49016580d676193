# SPDX-License-Identifier: Apache-2.0
"""What some tests need that not every machine has.

Outside CI such a test is skipped where it is missing, with the reason.  In CI, where everything is
installed, it fails: no test vanishes unnoticed.
"""

import os
import shutil
from pathlib import Path

import pytest

from zero8.op import cuda_compile

AARCH64_COMPILER, AARCH64_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def need(missing: str | None) -> None:
    """Skip the test, or fail in CI, if something is missing; `missing` says what."""
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"{missing}; in CI everything has to be there", pytrace=False)
    if missing:
        pytest.skip(missing)


def need_nvcc() -> None:
    """Skip the test, or fail in CI, without nvcc."""
    need(None if cuda_compile.nvcc() else "no nvcc: make setup")


def need_nvrtc() -> None:
    """Skip the test, or fail in CI, without NVRTC."""
    missing = None
    try:
        cuda_compile.compiler("nvrtc")
    except RuntimeError:
        missing = "no NVRTC through CuPy: make setup"
    need(missing)


def need_aarch64() -> None:
    """Skip the test, or fail in CI, without a compiler for aarch64 and an emulator of it."""
    tools = (AARCH64_COMPILER, AARCH64_EMULATOR)
    missing = "no g++ for aarch64, or no emulator: apt-get install g++-aarch64-linux-gnu qemu-user"
    need(None if all(shutil.which(tool) for tool in tools) else missing)


def need_guest() -> Path:
    """Return the kernel for an emulated host; skip the test, or fail in CI, without one."""
    kernels = [Path(f"/boot/vmlinuz-{folder.name}") for folder in Path("/lib/modules").glob("*")]
    kernels = [path for path in kernels if path.is_file()]
    has_tools = shutil.which("qemu-system-x86_64") and Path("/bin/busybox").is_file()
    missing = "no QEMU, or no kernel of Debian in /boot and /lib/modules for it: apt-get install "
    missing += "qemu-system-x86 linux-image-amd64 busybox-static"
    need(None if kernels and has_tools else missing)
    return max(kernels)
