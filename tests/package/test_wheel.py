# SPDX-License-Identifier: Apache-2.0
import email
import os
import re
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import processes
import pytest
from packaging.version import Version
from places import ROOT

import zero8


def check(command, **env):
    done = processes.run([str(word) for word in command], seconds=280, PYTHONPATH=None, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with a source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    check([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT])
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


def test_sdist_holds_every_file_of_the_folders_that_users_read(dist):
    (path,) = dist.glob("*.tar.gz")
    names = {name.partition("/")[2] for name in tarfile.open(path).getnames()}
    folders = "benchmarks", "configs", "csrc", "docs", "examples", "launch", "tests", "zero8"
    paths = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.*")]
    files = [path for path in paths if (ROOT / path).is_file() and path.suffix != ".pyc"]
    assert len(files) > 500
    assert [str(path) for path in files if path.as_posix() not in names] == []
    assert {"Makefile", "README.md", "CHANGELOG.md", "LICENSE", "CONTRIBUTING.md"} <= names
    assert "mkdocs.yml" in names


def test_wheel_holds_the_package_and_every_source_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (path for path in (ROOT / "csrc").rglob("[a-z]*") if path.is_file()):
        assert f"zero8/{path.relative_to(ROOT).as_posix()}" in names
    for path in (ROOT / "zero8").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in names
    assert "zero8/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"zero8"}


def test_wheel_is_under_1_mb_and_holds_no_benchmarks_and_examples(wheel):
    assert wheel.stat().st_size < 1e6
    left_out = [*(ROOT / "benchmarks" / "records").iterdir(), *(ROOT / "examples").glob("[!_]*.py")]
    moved = {path.name for path in left_out}
    assert len(moved) > 20
    assert moved.isdisjoint(Path(name).name for name in zipfile.ZipFile(wheel).namelist())


def test_wheel_version_is_that_of_the_module_and_heads_the_changelog(wheel):
    (name,) = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA"))
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
    assert metadata["Version"] == zero8.__version__
    heading = re.search(r"^## (\S+) \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading[1] == Version(zero8.__version__).base_version


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


@pytest.mark.slow
def test_wheel_in_an_empty_environment_builds_the_op_and_steps(venv, tmp_path):
    compiler = processes.unoptimized_compiler(tmp_path / "bin")
    path = f"{compiler}:{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PATH": path, "CXX": None}
    # -I keeps the current folder, which holds a zero8 too, off sys.path.
    where = "\nfrom zero8.op import build; print(zero8.__file__, build.source_folder())"
    printed = check([venv / "bin" / "python", "-I", "-c", processes.STEP + where], **env)
    assert f"stepped with {tmp_path}" in printed
    # The command finds the op that the step has compiled.
    assert str(tmp_path) in check([venv / "bin" / "zero8", "doctor"], **env)
    places = printed.splitlines()[-1].split()
    assert all(Path(place).is_relative_to(venv) for place in places), places


@pytest.mark.slow
def test_wheel_in_an_empty_environment_registers_on_import_torch(venv):
    code = "import torch; print(torch.optim.Adam8bitBlockwise.__module__)"
    printed = check([venv / "bin" / "python", "-I", "-c", code], TORCH_DEVICE_BACKEND_AUTOLOAD=None)
    assert printed.strip() == "zero8.optimizer.elementwise"
