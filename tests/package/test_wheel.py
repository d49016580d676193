# SPDX-License-Identifier: Apache-2.0
import json
import os
import platform
import re
import sys
import sysconfig
import zipfile
from pathlib import Path

import processes
import pytest
from places import ROOT, SUPPORT
from ranks import free_port

WORKER = SUPPORT / "wheel_worker.py"

pytestmark = pytest.mark.slow


def check(command, **env):
    done = processes.run([str(word) for word in command], seconds=500, PYTHONPATH=None, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with a source distribution, and the wheel that is built from it.

    To save a minute its binary is less optimized than that of `make wheel`.
    """
    folder = tmp_path_factory.mktemp("dist")
    env = processes.compiler_in(tmp_path_factory.mktemp("compiler") / "bin", "-O1")
    path = os.pathsep.join([env["PATH"], sysconfig.get_path("scripts")])
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    check(command, **env | {"PATH": path})
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


def test_wheel_holds_the_package_and_every_source_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (path for path in (ROOT / "csrc").rglob("[a-z]*") if path.is_file()):
        assert f"zero8/{path.relative_to(ROOT).as_posix()}" in names
    for path in (ROOT / "zero8").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in names
    assert {"zero8/py.typed", "zero8/op/zero8_kernel.abi3.so"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"zero8"}


def test_wheel_is_of_any_python_and_of_glibc_2_28(wheel):
    """Of any Python from 3.11 on; as the wheels that torch has since 2.6."""
    assert wheel.name.endswith(f"-cp311-abi3-linux_{platform.machine()}.whl")
    said = check([sys.executable, "-m", "auditwheel", "show", wheel])
    tag = re.search(r"manylinux_2_(\d+)_", said)
    assert tag and int(tag[1]) <= 28, said


@pytest.fixture(scope="module")
def venv(wheel, tmp_path_factory):
    """An environment with the wheel, and everything else from the one that runs the tests."""
    folder = tmp_path_factory.mktemp("venv")
    check([sys.executable, "-m", "venv", folder])
    python = folder / "bin" / "python"
    check([python, "-m", "pip", "install", "--no-deps", "--no-index", wheel])
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(check([python, "-c", show]).strip())
    # Entries of a .pth file come last and their own .pth files are not read: no editable zero8.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.mark.parametrize("mode", ["plain", "fsdp2", "zero2"])
def test_wheel_without_compiler_steps_with_its_binary_on_the_threads_of_torch(venv, tmp_path, mode):
    """The environment has no compiler, ninja and make on its PATH."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    port = str(free_port())
    words = [*launcher, port, WORKER, mode] if mode == "fsdp2" else [WORKER, mode, port]
    env = {"PATH": str(tmp_path), "CXX": None, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    printed = check([venv / "bin" / "python", *words], **env)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    assert len(lines) == (2 if mode == "fsdp2" else 1), printed
    for line in lines:
        found = json.loads(line)
        assert Path(found["op"]).is_relative_to(venv), line
        assert (found["has_threads"], found["runtimes"]) == (True, 1), line
    assert list(tmp_path.iterdir()) == []
