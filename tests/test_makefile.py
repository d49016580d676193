# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def make(*arguments, folder=ROOT, **env):
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=os.environ | {"MAKEFLAGS": ""} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def checkout(tmp_path):
    """What the set-up reads, and no .venv."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def fake_python(folder, refused):
    """A python3 that is this one, but fails at code that contains `refused`."""
    script = folder / "python3"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *{refused}*) exit 1;; esac\nexec "{sys.executable}" "$@"\n'
    )
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("train", "launch/local.sh"),
        ("bench", "bench step --json runs/bench_step.json"),
        ("gpu-check", "-m zero8.bench.gpu_check"),
        ("test", '-m pytest -m "not slow"'),
        ("test-full", "-m pytest -m slow"),
        ("lint", "ruff check"),
        ("lint", "ruff format --check"),
        ("lint", "clang-format"),
    ],
)
def test_target_dry_run_names_its_command(target, expected):
    done = make("-n", target)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_bench_writes_where_out_says():
    assert "--json there.json" in make("-n", "bench", OUT="there.json").stdout


def test_gpu_check_installs_the_peers_or_with_a_python_that_has_all_nothing(checkout):
    assert ".[peers]" in make("-n", "gpu-check", folder=checkout).stdout
    done = make("-n", "gpu-check", "GPU_PYTHON=python3", folder=checkout)
    # Under another make there are lines on folders around it.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("make")]
    assert lines == ["python3 -m zero8.bench.gpu_check"]


def test_target_in_a_fresh_checkout_installs_first(checkout):
    done = make("-n", "lint", folder=checkout)
    assert done.stdout.index("-m venv .venv") < done.stdout.index("pip install -c constraints.txt")
    assert done.stdout.index("pip install") < done.stdout.index("ruff check")


def test_setup_with_a_current_stamp_does_nothing(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".installed").touch()
    assert "pip install" not in make("-n", "lint", folder=checkout).stdout
    os.utime(checkout / "constraints.txt", (2**31 - 1, 2**31 - 1))
    assert "pip install" in make("-n", "lint", folder=checkout).stdout


@pytest.mark.parametrize(
    ("refused", "package"), [("ensurepip", "python3-venv"), ("Python.h", "python3-dev")]
)
def test_setup_python_that_lacks_a_part_names_the_package(checkout, tmp_path, refused, package):
    fake_python(tmp_path, refused)
    done = make("setup", folder=checkout, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode != 0
    assert done.stderr.splitlines()[0].endswith(f"apt-get install {package}")
    assert not (checkout / ".venv").exists()


def test_setup_without_compiler_names_the_package(checkout):
    done = make("setup", folder=checkout, CXX="no-such-c++", PYTHON=sys.executable)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0].endswith("apt-get install g++")


def test_setup_python_too_old_says_which_it_was(checkout, tmp_path):
    fake_python(tmp_path, "version_info")
    done = make("setup", folder=checkout, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode != 0
    assert "expected Python 3.10 or newer, got Python 3." in done.stderr
    assert not (checkout / ".venv").exists()


def test_setup_path_with_a_space_is_refused_before_anything_is_installed(checkout):
    moved = checkout.rename(checkout.with_name("check out"))
    done = make("setup", folder=moved, PYTHON=sys.executable)
    assert done.returncode != 0
    assert "got a path with a space" in done.stderr
    assert not (moved / ".venv").exists()


def test_missing_packages_on_this_machine_prints_nothing():
    assert make("--silent", "missing-packages", PYTHON=sys.executable).stdout == ""
