# SPDX-License-Identifier: Apache-2.0
"""How the op is built, kept and loaded.

The op itself is compiled twice here, without optimisation; the rest is shown on a tiny extension.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import processes
import pytest
from processes import compiled, compiler_in, wait_until
from tiny_op import SOURCE

from zero8.op import build
from zero8.zero.op_builder import Zero8AdamBuilder

NO_COMPILER = "no-such-c++"


# --- The op --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A folder that `zero8 build --into` has filled, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    into = folder / "new" / "extensions"
    env = compiler_in(folder / "bin", "-O0")
    command = [sys.executable, "-m", "zero8.cli", "build", "--json", "--into", str(into)]
    done = processes.run(command, TORCH_EXTENSIONS_DIR=str(folder / "unused"), **env)
    assert done.returncode == 0, done.stderr
    assert not (folder / "unused").exists()
    return into, json.loads(done.stdout)


@pytest.fixture(scope="session")
def first_steps(tmp_path_factory):
    """The folder that two processes which started together have filled, and how that went."""
    folder = tmp_path_factory.mktemp("first_steps")
    env = compiler_in(folder / "bin", "-O0") | {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    patience = "from zero8.op import locks; locks.PATIENCE_S = 0.1\n"
    command = [sys.executable, "-c", patience + processes.STEP]
    with processes.started(command, **env) as a, processes.started(command, **env) as b:
        results = [process.communicate(timeout=150) for process in (a, b)]
        assert [process.returncode for process in (a, b)] == [0, 0], results
    return folder, [out for out, _ in results], [err for _, err in results]


def test_build_two_processes_on_an_empty_folder_compile_one_target_once(first_steps):
    folder, printed, _ = first_steps
    assert all("stepped" in out for out in printed)
    extension = build.op(build.target_of_steps())
    assert len(compiled(folder / "bin")) == len(extension.sources) + 1  # what is generated
    names = sorted(path.name for path in (folder / "extensions").iterdir())
    assert names == [f"{extension.name}.flock", extension.folder().name]


def test_build_that_takes_a_while_says_so_and_whoever_waits_says_for_whom(first_steps):
    _, _, errors = first_steps
    said = "".join(errors)
    assert said.count("zero8: compiling its CPU kernel once, about 10 s; `zero8 build` does") == 1
    assert said.count("zero8: has waited 0 s for process ") == 1
    assert f" on {os.uname().nodename}, since " in said


OTHER_TARGET = """
from zero8.op import kernel
from zero8.op.dynamic_tables import dynamic_maps
op = kernel.module()
print(op.targets())
(other,) = [name for name in ("baseline", "avx2") if name not in op.targets()][:1]
empty = kernel.packed([])
try:
    op.step(*empty, dynamic_maps(), 1, kernel.isas()[other])
except ValueError as error:
    print(error)
"""


def test_op_for_one_target_refuses_the_others(first_steps):
    env = {"TORCH_EXTENSIONS_DIR": str(first_steps[0] / "extensions"), "ZERO8_ISA": None}
    done = processes.python(OTHER_TARGET, **env)
    assert done.returncode == 0, done.stderr
    targets, refusal = done.stdout.splitlines()
    assert targets == str([build.target_of_steps()])
    assert "built without the instruction set asked for" in refusal


def test_build_into_a_folder_prints_the_path_of_an_op_for_all_targets(whole):
    folder, printed = whole
    assert Path(printed["path"]).is_file()
    assert Path(printed["path"]).parent.parent == folder
    assert printed["seconds"] > 0
    code = "from zero8.op import kernel; print(*kernel.module().targets())"
    done = processes.python(code, TORCH_EXTENSIONS_DIR=str(folder), CXX=NO_COMPILER)
    assert done.stdout.split() == list(build.TARGETS), done.stderr


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


def test_copy_of_a_built_folder_that_is_read_only_loads_without_compiler_and_ninja(whole, tmp_path):
    copy = tmp_path / "image" / "extensions"
    shutil.copytree(whole[0], copy)
    (tmp_path / "bin").mkdir()
    env = {"TORCH_EXTENSIONS_DIR": str(copy), "PATH": str(tmp_path / "bin"), "CXX": None}
    done = processes.python(READ_ONLY + processes.STEP, **env)
    assert f"stepped with {copy}" in done.stdout, done.stderr
    assert "compiling" not in done.stderr


WITHOUT_DEEPSPEED = """
import sys
class NoDeepSpeed:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "deepspeed":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoDeepSpeed())

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


def test_without_deepspeed_it_steps_saves_loads_and_doctor_has_one_line_about_it(whole):
    done = processes.python(WITHOUT_DEEPSPEED, TORCH_EXTENSIONS_DIR=str(whole[0]))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "deepspeed" in line.lower()]
    assert [line.split()[:3] for line in lines] == [["deepspeed", "not", "installed;"]]
    assert "pip install 'zero8[deepspeed]'" in lines[0]


STEP_THAT_CANNOT = """
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
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PATH": str(tmp_path), "CXX": None}
    done = processes.python(STEP_THAT_CANNOT, **env)
    assert done.returncode == 0, done.stderr
    assert "apt-get install g++" in done.stdout
    assert f"{tmp_path}/zero8_adam_" in done.stdout
    assert list(tmp_path.iterdir()) == []


CONSTRUCTED = """
import torch, zero8
from zero8.op import kernel
for device in ("meta", "cpu"):
    p = torch.nn.Parameter(torch.ones(64, 64, device=device), requires_grad=device == "cpu")
    zero8.Adam8bitBlockwise([p])
    print(device, kernel.module.cache_info().currsize)
"""


def test_constructor_loads_the_op_for_parameters_on_a_served_device(whole):
    done = processes.python(CONSTRUCTED, TORCH_EXTENSIONS_DIR=str(whole[0]))
    assert done.stdout.splitlines() == ["meta 0", "cpu 1"], done.stderr


def test_flags_of_the_build_keep_floating_point_exact():
    flags = " ".join(build.FLAGS)
    assert "-ffp-contract=off" in flags
    assert not any(flag in flags for flag in ("-march", "-mtune", "-ffast-math", "-Ofast"))
    assert not any(flag in flags for flag in ("-ffinite", "-funsafe", "-fassociative"))


@pytest.mark.parametrize(
    ("flags", "isa", "expected"),
    [
        ("sse2", None, "baseline"),
        ("avx2 fma", None, "baseline"),
        ("avx2 fma f16c avx512f", None, "avx2"),
        (" ".join(sorted(build.TARGETS["avx512"])), None, "avx512"),
        (" ".join(sorted(build.TARGETS["avx512vbmi"])), None, "avx512vbmi"),
        (" ".join(sorted(build.TARGETS["avx512vbmi"])), "avx2", "avx2"),
        # Which a step then refuses.
        ("avx2 fma f16c", "avx512", "avx2"),
        ("avx2 fma f16c", "mmx", "avx2"),
    ],
)
def test_target_of_steps_is_what_the_environment_asks_for_or_the_fastest(
    monkeypatch, flags, isa, expected
):
    monkeypatch.setattr(build, "processor_flags", lambda: set(flags.split()))
    monkeypatch.delenv("ZERO8_ISA", raising=False)
    if isa:
        monkeypatch.setenv("ZERO8_ISA", isa)
    assert build.target_of_steps() == expected


def test_op_for_one_target_has_the_code_of_that_target_and_all_that_is_shared():
    stems = {path.stem for path in build.op("avx2").sources}
    everything = {path.stem for path in build.op().sources}
    assert everything - stems == {f"step_{name}" for name in build.TARGETS if name != "avx2"}


# --- A tiny extension ----------------------------------------------------------------------------

LOAD_TINY = """
import sys
from pathlib import Path
from zero8.op import build
print(build.Extension("tiny", (Path(sys.argv[1]),), 1).load().number)
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An extension that is compiled in a second, and an empty cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("CXX", raising=False)
    source = tmp_path / "sources" / "tiny.cpp"
    source.parent.mkdir()
    source.write_text(SOURCE)
    source.with_name("number.h").write_text("#define NUMBER 1\n")
    return build.Extension("tiny", (source,), seconds=1)


def test_header_that_changed_is_built_anew_and_the_old_build_stays(tiny, monkeypatch):
    assert not tiny.is_built()
    assert tiny.load().number == 1
    first = tiny.folder()
    tiny.sources[0].with_name("number.h").write_text("#define NUMBER 2\n")
    assert not tiny.is_built()
    assert tiny.load().number == 2
    assert tiny.folder() != first
    tiny.sources[0].with_name("number.h").write_text("#define NUMBER 1\n")
    monkeypatch.setenv("CXX", NO_COMPILER)
    assert tiny.load().number == 1


@pytest.mark.parametrize(
    "other",
    [
        ("zero8.op.build.torch.__version__", "2.99.0"),
        ("zero8.op.build.sysconfig.get_config_var", lambda name: ".cpython-399-riscv64.so"),
        ("zero8.op.build.FLAGS", ("-O0",)),
    ],
)
def test_build_of_another_torch_python_or_flags_is_not_used(tiny, monkeypatch, other):
    tiny.folder().mkdir(parents=True)
    (tiny.folder() / "complete").touch()
    assert tiny.is_built()
    monkeypatch.setattr(*other)
    assert not tiny.is_built()
    monkeypatch.setenv("CXX", NO_COMPILER)
    with pytest.raises(RuntimeError, match="apt-get install g") as caught:
        tiny.load()
    assert str(tiny.folder()) in str(caught.value)
    assert "TORCH_EXTENSIONS_DIR" in str(caught.value)


def test_build_that_cannot_be_loaded_names_the_folder_to_remove(tiny):
    tiny.folder().mkdir(parents=True)
    (tiny.folder() / f"{tiny.folder().name}.so").write_text("for another machine")
    (tiny.folder() / "complete").touch()
    with pytest.raises(ImportError, match=f"remove {tiny.folder()}"):
        tiny.load()


def test_cache_that_cannot_be_written_to_is_an_error_that_says_so(tiny, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "extensions"))
    with pytest.raises(RuntimeError, match="TORCH_EXTENSIONS_DIR chooses another place") as caught:
        tiny.load()
    assert str(tmp_path / "file" / "extensions") in str(caught.value)


def test_compiler_that_fails_is_an_error_and_the_same_process_can_try_again(
    tiny, monkeypatch, tmp_path
):
    full = tmp_path / "full-c++"
    stop = '[ "$1" = -MMD ] && echo No space left on device && exit 1'
    full.write_text(f'#!/bin/sh\n{stop}\nexec {shutil.which("c++")} "$@"\n')
    full.chmod(0o755)
    monkeypatch.setenv("CXX", str(full))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="No space left on device") as caught:
            tiny.load()
        assert f"{tiny.folder()} (TORCH_EXTENSIONS_DIR" in str(caught.value)
    monkeypatch.delenv("CXX")
    assert tiny.load().number == 1


def test_build_left_unfinished_by_a_killed_process_is_replaced(tiny):
    tiny.folder().mkdir(parents=True)
    (tiny.folder() / "lock").touch()  # torch's, which it would wait for without end
    assert tiny.load().number == 1
    left = {path.name for path in build.cache_root().iterdir()}
    assert left == {tiny.folder().name, "tiny.flock"}


def test_build_killed_half_way_the_next_build_succeeds_in_a_new_folder(tiny, tmp_path):
    env = compiler_in(tmp_path / "bin")
    command = [sys.executable, "-c", LOAD_TINY, str(tiny.sources[0])]
    with processes.started(command, STALL="never", **env) as first:
        wait_until(lambda: compiled(tmp_path / "bin"))
        first.kill()
        first.wait(10)
        assert (tiny.folder() / "lock").exists()
        second = processes.run(command, **env)
        assert second.stdout == "1\n", second.stderr
        # The compilers of the killed build live on, but cannot write into the new folder.
        places = [os.readlink(f"/proc/{pid}/cwd") for pid in processes.session(first.pid)]
        assert places
        assert all(place.endswith("(deleted)") for place in places), places


def test_build_uses_the_ninja_beside_the_interpreter(tiny, tmp_path, monkeypatch):
    other = tmp_path / "bin" / "ninja"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{other.parent}:{os.environ['PATH']}")
    assert tiny.load().number == 1
    assert os.environ["PATH"].startswith(str(other.parent))


# --- DeepSpeed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cxx", "expected"), [(None, True), (NO_COMPILER, False), ("", False), ("built", True)]
)
def test_is_compatible_if_the_op_is_built_or_there_is_a_compiler(
    monkeypatch, tmp_path, whole, cxx, expected
):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(whole[0] if cxx == "built" else tmp_path))
    if cxx is not None:
        monkeypatch.setenv("CXX", cxx)
    builder = Zero8AdamBuilder()
    assert builder.is_compatible() is expected
    assert (builder.error_log is None) is expected


def test_op_builder_loads_the_op_that_plain_pytorch_steps_with(whole):
    code = (
        "from zero8.op import kernel; from zero8.zero.op_builder import Zero8AdamBuilder; "
        "print(Zero8AdamBuilder().load(verbose=False) is kernel.module())"
    )
    done = processes.python(code, TORCH_EXTENSIONS_DIR=str(whole[0]), CXX=NO_COMPILER)
    assert done.stdout.splitlines()[-1] == "True", done.stderr
