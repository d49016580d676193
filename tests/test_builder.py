# SPDX-License-Identifier: Apache-2.0
import json
import os
import shutil
import sys
import time
from pathlib import Path

import processes
import pytest

from zero8.op.builder import Zero8AdamBuilder

SOURCES = len(Zero8AdamBuilder().sources())


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A c++ that notes its command lines, and saves time by not optimising; STALL stops it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    log = tmp_path / "compiled"
    log.touch()
    script = folder / "c++"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n'
        f'[ "$STALL:$1" = yes:-MMD ] && sleep 100\n'
        f'exec {shutil.which("c++")} "$@" -O0\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)
    return log


def compiled(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if " -c " in line]


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "time limit"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A build folder that `zero8 build` has filled, and what it printed."""
    folder = tmp_path_factory.mktemp("extensions")
    command = [sys.executable, "-m", "zero8.cli", "build", "--json"]
    done = processes.run(command, TORCH_EXTENSIONS_DIR=str(folder))
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_flags_of_the_build_keep_floating_point_exact():
    flags = " ".join(Zero8AdamBuilder().cxx_args())
    assert "-ffp-contract=off" in flags
    assert not any(flag in flags for flag in ("-march", "-mtune", "-ffast-math", "-Ofast"))
    assert not any(flag in flags for flag in ("-ffinite", "-funsafe", "-fassociative"))


def test_build_two_processes_on_an_empty_folder_compile_once_and_step(tmp_path, compiler):
    command = [sys.executable, "-c", processes.STEP]
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    with processes.started(command, **env) as a, processes.started(command, **env) as b:
        for process in (a, b):
            out, err = process.communicate(timeout=150)
            assert process.returncode == 0, err
            assert "stepped" in out
    assert len(compiled(compiler)) == SOURCES


@pytest.mark.slow
def test_build_ahead_of_time_leaves_nothing_to_compile(built, compiler):
    folder, printed = built
    assert Path(printed["path"]).is_file()
    assert Path(printed["path"]).is_relative_to(folder)
    assert printed["seconds"] > 0
    done = processes.python(processes.STEP, TORCH_EXTENSIONS_DIR=str(folder))
    assert printed["path"] in done.stdout, done.stderr
    assert compiled(compiler) == []


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_build_lock_left_by_a_killed_build_does_not_hang(tmp_path):
    folder = tmp_path / "extensions"
    (folder / "zero8_adam").mkdir(parents=True)
    (folder / "zero8_adam" / "lock").touch()
    done = processes.python(processes.STEP, TORCH_EXTENSIONS_DIR=str(folder))
    assert "stepped" in done.stdout, done.stderr
    assert sorted(os.listdir(folder)) == ["zero8_adam", "zero8_adam.flock"]


@pytest.mark.slow
def test_build_killed_half_way_the_next_build_succeeds_in_a_new_folder(tmp_path, compiler):
    folder = tmp_path / "extensions"
    env = {"TORCH_EXTENSIONS_DIR": str(folder)}
    command = [sys.executable, "-c", processes.STEP]
    with processes.started(command, STALL="yes", **env) as first:
        wait_until(lambda: compiled(compiler))
        first.kill()
        first.wait(10)
        assert (folder / "zero8_adam" / "lock").exists()
        second = processes.python(processes.STEP, **env)
        assert "stepped" in second.stdout, second.stderr
        # The compilers of the killed build live on, but cannot write into the new folder.
        places = [os.readlink(f"/proc/{pid}/cwd") for pid in processes.session(first.pid)]
        assert places
        assert all(place.endswith("(deleted)") for place in places), places


NO_COMPILER = """
import torch, zero8
p = torch.nn.Parameter(torch.ones(8192))
p.grad = torch.ones(8192)
optimizer = zero8.Adam8bitBlockwise([p], lr=0.1)
try:
    optimizer.step()
except RuntimeError as error:
    print(error)
assert not optimizer.state
assert (p == 1).all()
"""


def test_step_without_compiler_says_what_to_install_and_changes_nothing(tmp_path):
    done = processes.python(
        NO_COMPILER, TORCH_EXTENSIONS_DIR=str(tmp_path), PATH=str(tmp_path), CXX=None
    )
    assert done.returncode == 0, done.stderr
    assert "apt-get install g++" in done.stdout


@pytest.mark.parametrize(("cxx", "expected"), [(None, True), ("no-such-c++", False), ("", False)])
def test_is_compatible_depends_on_the_compiler(monkeypatch, cxx, expected):
    monkeypatch.delenv("CXX", raising=False)
    if cxx is not None:
        monkeypatch.setenv("CXX", cxx)
    builder = Zero8AdamBuilder()
    assert builder.is_compatible() is expected
    assert (builder.error_log is None) is expected


@pytest.mark.slow
def test_build_ninja_only_beside_the_interpreter_is_found(built, tmp_path):
    (tmp_path / "c++").symlink_to(shutil.which("c++"))
    env = {"TORCH_EXTENSIONS_DIR": str(built[0]), "PATH": str(tmp_path), "CXX": None}
    done = processes.python(processes.STEP, **env)
    assert "stepped" in done.stdout, done.stderr


def test_ds_report_lists_the_op_as_compatible():
    done = processes.python("from deepspeed.env_report import cli_main; cli_main()")
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("zero8_adam")]
    assert row.count("OKAY") == 1, row
