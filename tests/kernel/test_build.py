# SPDX-License-Identifier: Apache-2.0
"""How the op is found, built, kept and loaded: the one of the test run, or a tiny one."""

import os
import shutil
import sys

import processes
import pytest
import torch
from processes import compiled, compiler_in, wait_until

import zero8
from zero8.deepspeed.op_builder import Zero8AdamBuilder
from zero8.op import build, kernel

NO_COMPILER = "no-such-c++"
HOST = os.uname().nodename


# --- The op --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A copy of the folder that this test run has built."""
    build.load()
    into = tmp_path_factory.mktemp("image") / "extensions"
    shutil.copytree(build.library().parent, into / build.library().parent.name)
    return into


# Root may write to any folder, so the process refuses on its own what a read-only one would.
READ_ONLY = """
import os, sys
folder = os.environ["TORCH_EXTENSIONS_DIR"]
def refuse(event, arguments):
    writes = event == "open" and str(arguments[0]).startswith(folder) and arguments[2] & 3
    if writes or event == "fcntl.flock" or event == "os.mkdir" and folder in str(arguments[0]):
        raise OSError(30, "Read-only file system", str(arguments[0]))
sys.addaudithook(refuse)
"""


def test_copy_of_a_built_folder_that_is_read_only_loads_without_compiler(forks, whole, tmp_path):
    env = {"TORCH_EXTENSIONS_DIR": str(whole), "PATH": str(tmp_path), "CXX": None}
    done = forks.run(READ_ONLY + processes.STEP, **env)
    assert done.returncode == 0, done.stderr
    assert "compiling" not in done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"stepped with {whole}")


USE = """
import io, torch, zero8
from zero8 import cli

def made():
    torch.manual_seed(0)
    model = torch.nn.Linear(96, 128)
    return model, zero8.Adam8bitBlockwise(model.named_parameters(), lr=0.1)

def step(model, optimizer):
    model(torch.ones(4, 96)).square().sum().backward()
    optimizer.step()
    optimizer.check_finite()
    optimizer.zero_grad()

(model, optimizer), (other, loaded) = made(), made()
step(model, optimizer)
file = io.BytesIO()
torch.save([model.state_dict(), optimizer.state_dict()], file)
file.seek(0)
for target, state in zip((other, loaded), torch.load(file, weights_only=True), strict=True):
    target.load_state_dict(state)
for pair in ((model, optimizer), (other, loaded)):
    step(*pair)
assert torch.equal(model.weight, other.weight)
print(optimizer.memory_report())
assert cli.main(["doctor"]) == 0
assert not any(name.startswith("deepspeed") for name in sys.modules)
"""


def test_without_deepspeed_it_steps_saves_loads_and_doctor_has_one_line_about_it(forks, whole):
    done = forks.run(processes.without("deepspeed") + USE, TORCH_EXTENSIONS_DIR=str(whole))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "deepspeed" in line.lower()]
    assert [line.split()[:3] for line in lines] == [["deepspeed", "not", "installed;"]]
    assert "pip install 'zero8[deepspeed]'" in lines[0]


def test_step_without_compiler_says_what_to_install_and_changes_nothing(monkeypatch, tmp_path):
    for name in ("TORCH_EXTENSIONS_DIR", "PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    # As in a process that has not loaded the op.
    for function in (kernel.module, kernel.isas):
        monkeypatch.setattr(kernel, function.__name__, function.__wrapped__)
    p = torch.nn.Parameter(torch.ones(8192))
    p.grad = torch.ones(8192)
    optimizer = zero8.Adam8bitBlockwise([p], lr=0.1)
    with pytest.raises(RuntimeError, match="apt-get install g") as caught:
        optimizer.step()
    assert f"{tmp_path}/{build.NAME}_" in str(caught.value)
    assert not optimizer.state
    assert (p == 1).all()
    assert list(tmp_path.iterdir()) == []


# --- A tiny op -----------------------------------------------------------------------------------

SOURCE = """
#include <Python.h>
#include "number.h"
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_zero8_kernel() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "number", NUMBER);
  return module;
}
"""
# Without zero8/__init__.py, which imports torch.
LOAD_TINY = f"""
import sys, types
from pathlib import Path
sys.modules["zero8"] = types.ModuleType("zero8")
sys.modules["zero8"].__path__ = {zero8.__path__}
from zero8.op import build
build.source_folder = lambda: Path(sys.argv[1])
print(build.load().number)
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The folder of the sources of an op that is compiled in a second, and an empty cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("CXX", raising=False)
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "binding.cpp").write_text(SOURCE)
    (folder / "number.h").write_text("#define NUMBER 1\n")
    (folder / "flags.txt").write_text("-O0\n")
    monkeypatch.setattr(build, "source_folder", lambda: folder)
    monkeypatch.setattr(build, "INSTALLED", tmp_path / "wheel.so")
    return folder


def test_build_by_two_processes_is_done_once_and_whoever_waits_says_for_whom(tiny, tmp_path):
    env, go_on = compiler_in(tmp_path / "bin"), tmp_path / "go_on"
    command = [sys.executable, "-c", LOAD_TINY, str(tiny)]
    with processes.started(command, STALL=str(go_on), **env) as first:
        wait_until(lambda: compiled(tmp_path / "bin"))
        with processes.started(command, **env) as second:
            said = next(line for line in second.stderr if "waits for" in line)
            go_on.touch()
            ends = [process.communicate(timeout=60) for process in (first, second)]
    assert [out for out, _ in ends] == ["1\n", "1\n"], ends
    assert len(compiled(tmp_path / "bin")) == 1
    assert "zero8: compiling its CPU kernel once" in ends[0][1]
    assert f"waits for process {first.pid} on {HOST}, since " in said
    assert "remove that file and start again" in said
    names = sorted(path.name for path in (tmp_path / "extensions").iterdir())
    assert names == [f"{build.NAME}.flock", build.library().parent.name]


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [("number.h", "#define NUMBER 2\n", 2), ("flags.txt", "-O0 -DNUMBER_OF_FLAGS\n", 1)],
)
def test_source_that_changed_is_built_anew_and_the_old_build_stays(
    name, text, number, tiny, monkeypatch
):
    assert build.load().number == 1
    first, before = build.library(), (tiny / name).read_text()
    (tiny / name).write_text(text)
    assert not build.library().is_file()
    assert build.load().number == number
    assert build.library() != first
    (tiny / name).write_text(before)
    monkeypatch.setenv("CXX", NO_COMPILER)
    assert build.load().number == 1


def test_build_of_another_python_is_not_used(tiny, monkeypatch):
    build.library().parent.mkdir(parents=True)
    build.library().touch()
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: ".cpython-399-riscv64.so")
    assert not build.library().is_file()


def test_binary_of_a_wheel_is_taken_unless_zero8_build_asks_for_another(tiny, monkeypatch):
    assert build.load().number == 1
    build.library().rename(build.INSTALLED)
    (tiny / "number.h").write_text("#define NUMBER 2\n")
    monkeypatch.delenv("ZERO8_BUILD", raising=False)
    assert build.load().number == 1
    monkeypatch.setenv("ZERO8_BUILD", "1")
    assert build.load().number == 2


def test_op_that_cannot_be_loaded_says_what_to_remove_or_to_install(tiny):
    build.library().parent.mkdir(parents=True)
    build.library().write_text("for another machine")
    with pytest.raises(ImportError, match=f"remove {build.library().parent}"):
        build.load()
    build.INSTALLED.write_text("for another machine")
    with pytest.raises(ImportError, match="reinstall zero8"):
        build.load()


def test_cache_that_cannot_be_written_to_is_an_error_that_says_so(tiny, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "extensions"))
    with pytest.raises(RuntimeError, match="file/extensions .*chooses another place"):
        build.load()


def test_compiler_that_fails_is_an_error_and_the_same_process_can_try_again(
    tiny, monkeypatch, tmp_path
):
    full = tmp_path / "full-c++"
    full.write_text("#!/bin/sh\necho No space left on device >&2\nexit 1\n")
    full.chmod(0o755)
    monkeypatch.setenv("CXX", str(full))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="No space left on device") as caught:
            build.load()
        assert "TORCH_EXTENSIONS_DIR" in str(caught.value)
    assert [path.name for path in build.cache_root().iterdir()] == [f"{build.NAME}.flock"]
    monkeypatch.delenv("CXX")
    assert build.load().number == 1


def test_build_killed_half_way_the_next_build_succeeds_in_a_new_folder(tiny, tmp_path):
    env = compiler_in(tmp_path / "bin")
    command = [sys.executable, "-c", LOAD_TINY, str(tiny)]
    with processes.started(command, STALL="never", **env) as first:
        wait_until(lambda: compiled(tmp_path / "bin"))
        first.kill()
        first.wait(10)
        assert not build.library().is_file()
        assert build.load().number == 1
    left = {path.name for path in build.cache_root().iterdir()}
    assert left == {build.library().parent.name, f"{build.NAME}.flock"}


# --- DeepSpeed -----------------------------------------------------------------------------------


def test_op_builder_loads_the_op_that_plain_pytorch_steps_with(monkeypatch):
    module = kernel.module()
    monkeypatch.setenv("CXX", NO_COMPILER)
    builder = Zero8AdamBuilder()
    assert builder.is_compatible() and builder.load(verbose=False) is module
