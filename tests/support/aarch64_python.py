# SPDX-License-Identifier: Apache-2.0
"""Debian's Python for aarch64 with numpy, in a folder, which an emulator runs."""

import subprocess
import sys
from pathlib import Path

from needs import AARCH64_EMULATOR

VERSION = "3.11"
DEBIAN = (
    *(f"python{VERSION}-minimal", f"libpython{VERSION}-minimal", f"libpython{VERSION}-stdlib"),
    *("libc6", "libstdc++6", "libgcc-s1", "libcrypt1", "zlib1g", "libexpat1", "libffi8"),
    *("libbz2-1.0", "liblzma5", "libssl3"),
)
NUMPY = ["numpy<3", "--only-binary", ":all:", "--no-deps", "--python-version", VERSION]
PLATFORM = ["--platform", "manylinux_2_28_aarch64", "--platform", "manylinux2014_aarch64"]


def installed(folder: Path) -> list[str]:
    """Download the packages into a new folder; return the command that starts this Python."""
    for name in ("lists/partial", "archives/partial", "root"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    # Of this machine's apt only the list of sources is used.
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State": folder,
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    _run([*apt, "update"], folder)
    _run([*apt, "download", *DEBIAN], folder)
    for package in folder.glob("*.deb"):
        _run(["dpkg", "-x", package, folder / "root"], folder)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", folder / "site"]
    _run([*pip, *NUMPY, *PLATFORM], folder)
    python = folder / "root" / "usr" / "bin" / f"python{VERSION}"
    path = f"PYTHONPATH={folder / 'site'}"
    return [AARCH64_EMULATOR, "-E", path, "-L", str(folder / "root"), str(python)]


def _run(command: list[object], folder: Path) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
