# SPDX-License-Identifier: Apache-2.0
"""How DeepSpeed's ops are built: shown on a tiny one, which is compiled in a second."""

import functools
import os
import sys
from pathlib import Path

import processes
import pytest
from deepspeed.ops.op_builder import builder as builders
from places import SUPPORT
from processes import compiled, compiler_in, wait_until
from tiny_op import SOURCE, TinyBuilder
from torch.utils import cpp_extension

from zero8.op import build, locks
from zero8.zero import jit, seams

WORKER = str(SUPPORT / "tiny_op.py")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """The folder of the op's sources, and an empty cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("CXX", raising=False)
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(SOURCE)
    (folder / "number.h").write_text("#define NUMBER 1\n")
    return folder


@pytest.fixture
def load(sources, monkeypatch):
    """Return a function that loads the op as a process does that has not loaded it before."""

    def load(*flags):
        monkeypatch.setattr(builders.OpBuilder, "_loaded_ops", {})
        monkeypatch.setattr(TinyBuilder, "flags", flags)
        return TinyBuilder(str(sources)).load()

    return load


def builds():
    return sorted(path.name for path in build.cache_root().iterdir() if path.is_dir())


def test_op_is_built_in_a_folder_of_its_own_whatever_lies_in_that_of_torch(load):
    """A lock that a killed build of plain DeepSpeed has left holds up nobody."""
    plain = build.cache_root() / "tiny"
    plain.mkdir(parents=True)
    (plain / "lock").touch()
    module = load()
    assert module.number == 1
    assert Path(module.__file__).parent != plain
    assert [path.name for path in plain.iterdir()] == ["lock"]


def test_op_that_fits_is_loaded_without_ninja_and_whatever_the_compiler(load, monkeypatch):
    first = load().__file__

    def fail(*_):
        raise AssertionError("asked ninja")

    monkeypatch.setattr("torch.utils.cpp_extension._run_ninja_build", fail)
    monkeypatch.setenv("CXX", "no-such-c++")
    assert load().__file__ == first


def test_op_of_other_headers_or_flags_is_built_beside_the_first_which_stays(
    load, sources, monkeypatch
):
    assert load().number == 1
    (sources / "number.h").write_text("#define NUMBER 2\n")
    assert load().number == 2
    (sources / "number.h").write_text("#define NUMBER 1\n")
    assert load("-DNUMBERS").number == 1
    assert len(builds()) == 3
    monkeypatch.setenv("CXX", "no-such-c++")
    assert load().number == 1


def folder_of(*flags, include=()):
    return jit._folder("tiny", [__file__], list(include), verbose=False, extra_cflags=list(flags))


def test_folder_names_the_processor_where_the_compiler_uses_all_of_it(monkeypatch):
    """Hosts of several kinds may share a home directory."""
    native, portable = folder_of("-march=native"), folder_of("-O3")
    monkeypatch.setattr(build, "processor_flags", lambda: {"another"})
    assert folder_of("-march=native") != native
    assert folder_of("-O3") == portable


@pytest.mark.parametrize(
    "other",
    [
        ("zero8.zero.jit.torch.__version__", "2.99.0"),
        ("zero8.zero.jit.sysconfig.get_config_var", lambda name: ".cpython-399-riscv64.so"),
    ],
)
def test_folder_of_another_torch_or_python_is_another(monkeypatch, other):
    before = folder_of()
    monkeypatch.setattr(*other)
    assert folder_of() != before


def test_folder_does_not_depend_on_where_deepspeed_is_installed(tmp_path, monkeypatch):
    """Virtual environments with the same packages share their ops; headers of its own count."""
    names = []
    for place in ("a", "b"):
        package = tmp_path / place / "deepspeed"
        for file, text in (("csrc/op.cpp", ""), ("includes/op.h", "1"), ("csrc/cpu/op.cuh", "2")):
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            (package / file).write_text(text)
        monkeypatch.setattr("deepspeed.__file__", str(package / "__init__.py"))
        arguments = ([f"{package}/csrc/op.cpp"], [f"{package}/includes"])
        names.append(jit._folder("op", *arguments, verbose=False))
    assert names[0] == names[1]
    for file in ("csrc/op.cpp", "includes/op.h", "csrc/cpu/op.cuh"):
        (package / file).write_text("3")
        names.append(jit._folder("op", *arguments, verbose=True))
    assert len(set(names)) == 4


def test_op_without_compiler_is_what_deepspeed_has_built_or_an_error_that_says_what_to_install(
    load, monkeypatch
):
    monkeypatch.setenv("CXX", "no-such-c++")
    with pytest.raises(RuntimeError, match="apt-get install g"):
        load()
    (build.cache_root() / "tiny").mkdir(parents=True, exist_ok=True)
    (build.cache_root() / "tiny" / "tiny.so").touch()
    with monkeypatch.context() as patch:
        patch.setattr("torch.utils.cpp_extension.load", lambda **arguments: arguments["name"])
        assert load() == "tiny"
    (build.cache_root() / "tiny" / "lock").touch()  # torch would wait for it
    with pytest.raises(RuntimeError, match="apt-get install g"):
        load()


def test_load_of_another_extension_meanwhile_is_left_to_torch(monkeypatch):
    real = functools.partial(dict, by="torch")
    monkeypatch.setattr(cpp_extension, "load", real)
    with jit._loads_by(functools.partial(jit._load, "tiny")):
        assert cpp_extension.load(name="other") == {"name": "other", "by": "torch"}
        assert cpp_extension.load([("name", "tiny")]) == {"name": "tiny", "by": "torch"}
    assert cpp_extension.load is real


@pytest.fixture
def builder(sources, tmp_path, monkeypatch):
    """A process that stops where it compiles the op until there is the file `go_on`.

    This one does not wait for a lock before it says for whom.
    """
    env = compiler_in(tmp_path / "bin")
    monkeypatch.setenv("PATH", env["PATH"])
    monkeypatch.setattr(locks, "PATIENCE_S", 0.1)
    command = [sys.executable, WORKER, str(sources)]
    with processes.started(command, STALL=str(tmp_path / "go_on"), **env) as process:
        wait_until(lambda: compiled(tmp_path / "bin"), seconds=120)
        yield process


def do_before_waiting(monkeypatch, action):
    """Do something when this process has named the holder of a lock and is going to wait."""
    wait_for = locks.flock.wait_for
    monkeypatch.setattr(locks.flock, "wait_for", lambda file: [action(), wait_for(file)])


def test_two_processes_compile_once(load, builder, tmp_path, monkeypatch, caplog):
    do_before_waiting(monkeypatch, (tmp_path / "go_on").touch)
    assert load().number == 1
    out, err = builder.communicate(timeout=60)
    assert out.split()[-1:] == ["1"], err
    assert len(compiled(tmp_path / "bin")) == 1
    said = err + "".join(caplog.messages)
    assert said.count("zero8: compiling DeepSpeed's op tiny once; `zero8 build CONFIG`") == 1


def test_builder_is_waited_for_and_named_after_a_while_and_when_it_is_killed_the_next_builds(
    load, builder, monkeypatch, caplog
):
    (left,) = build.cache_root().glob("*/lock")  # torch's
    do_before_waiting(monkeypatch, builder.kill)
    assert load().number == 1
    said = caplog.messages[0]
    assert f"has waited 0 s for process {builder.pid} on {os.uname().nodename}, since " in said
    assert "goes on when that one ends" in said
    assert not left.exists()


def test_seam_is_installed_by_the_import_and_installing_it_again_changes_nothing():
    installed = builders.OpBuilder.jit_load
    assert seams.state_of(installed) == "installed"
    seams.build_ops_once(builders)
    assert builders.OpBuilder.jit_load is installed


def test_seam_of_an_unknown_deepspeed_is_refused_and_left_as_it_is(monkeypatch):
    def another(self, loud):
        """A method of other parameters."""

    monkeypatch.setattr(builders.OpBuilder, "jit_load", another)
    with pytest.raises(RuntimeError, match=r"does not fit this DeepSpeed.*jit_load\(verbose\)"):
        seams.build_ops_once(builders)
    assert builders.OpBuilder.jit_load is another


def test_seam_puts_the_ninja_of_this_python_first(load, tmp_path, monkeypatch):
    other = tmp_path / "bin" / "ninja"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{other.parent}:{os.environ['PATH']}")
    assert load().number == 1
    assert os.environ["PATH"].startswith(str(other.parent))
