# SPDX-License-Identifier: Apache-2.0
"""How the op is built, kept and loaded.

`make test-slow` compiles the op for one target, algorithm and codec, not optimized; the rest uses
the op that the test run has built, or a tiny extension.
"""

import json
import os
import platform
import shutil
import sys
from itertools import product
from pathlib import Path

import processes
import pytest
import torch
from processes import compiled, compiler_in, wait_until
from tiny_op import SOURCE

import zero8
from zero8 import cli
from zero8.algorithms.table import ADAM, ELEMENTWISE, MUON
from zero8.op import build, kernel, locks
from zero8.op.structs import FLOAT32_MOMENTS
from zero8.spec.codec import CODECS
from zero8.zero.op_builder import Zero8AdamBuilder

NO_COMPILER = "no-such-c++"
X86 = build.TARGETS_OF["x86_64"]


# --- The op --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A copy of the folder in which this test run has built the op for all targets."""
    op = build.op()
    op.load()
    into = tmp_path_factory.mktemp("image") / "extensions"
    shutil.copytree(op.folder(), into / op.folder().name)
    return into


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


@pytest.mark.slow
def test_build_two_processes_on_an_empty_folder_compile_one_step_once(first_steps):
    folder, printed, _ = first_steps
    assert all("stepped" in out for out in printed)
    extension = build.op_for(build.target_of_steps(), *kernel.DEFAULT_STEPS)
    assert len(compiled(folder / "bin")) == len(extension.sources) + len(extension.generated)
    names = sorted(path.name for path in (folder / "extensions").iterdir())
    assert names == [f"{extension.name}.flock", extension.folder().name]


@pytest.mark.slow
def test_build_that_takes_a_while_says_so_and_whoever_waits_says_for_whom(first_steps):
    _, _, errors = first_steps
    said = "".join(errors)
    assert said.count("zero8: compiling its CPU kernel once, about 25 s; `zero8 build` does") == 1
    assert said.count("zero8: has waited 0 s for process ") == 1
    assert f" on {os.uname().nodename}, since " in said


OTHER_STEPS = """
import os, torch, zero8
from zero8.op import kernel

op = kernel.module()
print(op.steps())
kernel.module, kernel.module_for = lambda steps=None: op, lambda isa, steps: op
compiled = [isa for isa, *_ in op.steps()]
others = [(zero8.Adam8bitBlockwise, "log", isa) for isa in kernel.isas() if isa not in compiled]
ours = compiled[-1]
others += [(zero8.Lion8bitBlockwise, "log", ours), (zero8.Adam8bitBlockwise, "fp8", ours)]
for optimizer_class, codec, isa in others:
    os.environ["ZERO8_ISA"] = isa
    p = torch.nn.Parameter(torch.ones(64, 64))
    p.grad = torch.ones(64, 64)
    try:
        optimizer_class([p], codec=codec).step()
    except ValueError as error:
        print(error)
    else:
        print("stepped")
"""


@pytest.mark.slow
def test_op_for_one_step_refuses_others(first_steps):
    env = {"TORCH_EXTENSIONS_DIR": str(first_steps[0] / "extensions"), "ZERO8_ISA": None}
    done = processes.python(OTHER_STEPS, **env)
    assert done.returncode == 0, done.stderr
    steps, *refusals = done.stdout.splitlines()

    def code(target):
        return build.compiled_target(target, CODECS["log"])

    same = [isa for isa in kernel.isas() if code(isa) == code(build.target_of_steps())]
    codecs = (FLOAT32_MOMENTS, CODECS["log"].number)
    assert steps == str([(isa, ADAM.number, codec) for isa in same for codec in codecs])
    assert len(refusals) == len(kernel.isas()) - len(same) + 2
    assert all("without the algorithm, codec and instruction set" in one for one in refusals)


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


CONSTRUCTED = """
import torch, zero8
from zero8.op import kernel
for device in ("meta", "cpu"):
    p = torch.nn.Parameter(torch.ones(64, 64, device=device), requires_grad=device == "cpu")
    zero8.Adam8bitBlockwise([p])
    print(device, *(algorithm.name for algorithm, _ in kernel._loaded))
p.grad = torch.ones(64, 64)
zero8.Muon8bitBlockwise([p], adam_params=[]).step()
print(len({id(one) for one in kernel._loaded.values()}), *kernel._loaded.values())
print(*dict.fromkeys(isa for isa, *_ in kernel.module().steps()))
"""


@pytest.fixture(scope="session")
def from_a_copy(forks, whole, tmp_path_factory):
    """What a process prints that can only read a copy, and has neither compiler nor ninja."""
    nothing = tmp_path_factory.mktemp("nothing")
    env = {"TORCH_EXTENSIONS_DIR": str(whole), "PATH": str(nothing), "CXX": None}
    done = forks.run(READ_ONLY + CONSTRUCTED + processes.STEP, **env)
    assert done.returncode == 0, done.stderr
    assert "compiling" not in done.stderr
    return done.stdout.splitlines()


def test_copy_of_a_built_folder_that_is_read_only_loads_without_compiler_and_ninja(
    from_a_copy, whole
):
    modules, targets, stepped = from_a_copy[-3:]
    assert modules.startswith("1 <")
    assert stepped.startswith(f"stepped with {whole}")
    assert targets.split() == list(build.TARGETS)


def test_constructor_loads_the_op_for_parameters_on_a_served_device(from_a_copy):
    assert from_a_copy[:2] == ["meta", "cpu adam"]


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


def test_without_deepspeed_it_steps_saves_loads_and_doctor_has_one_line_about_it(forks, whole):
    done = forks.run(WITHOUT_DEEPSPEED, TORCH_EXTENSIONS_DIR=str(whole))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "deepspeed" in line.lower()]
    assert [line.split()[:3] for line in lines] == [["deepspeed", "not", "installed;"]]
    assert "pip install 'zero8[deepspeed]'" in lines[0]


def test_step_without_compiler_says_what_to_install_and_changes_nothing(monkeypatch, tmp_path):
    for name in ("TORCH_EXTENSIONS_DIR", "PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    # As in a process that has not loaded the op.
    monkeypatch.setattr(kernel, "_loaded", {})
    for function in (kernel._module_of, kernel.module_for, kernel.isas):
        monkeypatch.setattr(kernel, function.__name__, function.__wrapped__)
    p = torch.nn.Parameter(torch.ones(8192))
    p.grad = torch.ones(8192)
    optimizer = zero8.Adam8bitBlockwise([p], lr=0.1)
    with pytest.raises(RuntimeError, match="apt-get install g") as caught:
        optimizer.step()
    assert f"{tmp_path}/zero8_adam_" in str(caught.value)
    assert not optimizer.state
    assert (p == 1).all()
    assert list(tmp_path.iterdir()) == []


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
        (" ".join(sorted(X86["avx512"])), None, "avx512"),
        (" ".join(sorted(X86["avx512vbmi"])), None, "avx512vbmi"),
        (" ".join(sorted(X86["avx512vbmi"])), "avx2", "avx2"),
        # Which a step then refuses.
        ("avx2 fma f16c", "avx512", "avx2"),
        ("avx2 fma f16c", "mmx", "avx2"),
    ],
)
def test_target_of_steps_is_what_the_environment_asks_for_or_the_fastest(
    monkeypatch, flags, isa, expected
):
    monkeypatch.setattr(build, "TARGETS", X86)
    monkeypatch.setattr(build, "processor_flags", lambda: set(flags.split()))
    monkeypatch.delenv("ZERO8_ISA", raising=False)
    if isa:
        monkeypatch.setenv("ZERO8_ISA", isa)
    assert build.target_of_steps() == expected


@pytest.mark.parametrize(("flags", "expected"), [("fp asimd evtstrm", "neon"), ("", "baseline")])
def test_target_of_steps_on_arm_is_neon_where_the_processor_is_known(monkeypatch, flags, expected):
    monkeypatch.setattr(build, "TARGETS", build.TARGETS_OF["aarch64"])
    monkeypatch.setattr(build, "processor_flags", lambda: set(flags.split()))
    monkeypatch.delenv("ZERO8_ISA", raising=False)
    assert build.target_of_steps() == expected


def test_compiler_of_another_system_than_linux_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="built on Linux alone, this is darwin: it needs OpenMP"):
        build.check_compiler(tmp_path)


def test_op_of_a_machine_has_the_steps_of_its_targets_alone():
    for machine, targets in build.TARGETS_OF.items():
        files = [name for name, _ in build.op(machine).generated if name.startswith("step_")]
        assert {name.split("_")[1] for name in files} == set(targets)
    assert build.op().generated == build.op(platform.machine()).generated


def test_op_for_one_step_compiles_that_step_and_all_that_is_shared():
    whole, one = build.op(), build.op_for("baseline", MUON, CODECS["fp8"])
    assert one.sources == whole.sources
    mine = {"step_baseline_sgd_float32.cpp", "step_baseline_sgd_fp8.cpp"}
    assert {name for name, _ in one.generated} == mine | {"numbers.cpp"}
    # avx512vbmi has code of its own for one codec.
    targets = [target for target in build.TARGETS if target != "avx512vbmi"]
    every = [*product(targets, ELEMENTWISE, ("float32", *CODECS))]
    if "avx512vbmi" in build.TARGETS:
        every += product(["avx512vbmi"], ELEMENTWISE, ["dynamic"])
    steps = {f"step_{target}_{algorithm.name}_{codec}.cpp" for target, algorithm, codec in every}
    assert {name for name, _ in whole.generated} == steps | {"numbers.cpp"}
    assert set(one.generated) < set(whole.generated)


@pytest.mark.parametrize(("codec", "target"), [("log", "avx512"), ("dynamic", "avx512vbmi")])
def test_op_for_one_step_with_permutations_of_bytes_has_them_for_dynamic_alone(codec, target):
    generated = build.op_for("avx512vbmi", ADAM, CODECS[codec]).generated
    own = {"step_avx512_adam_float32.cpp", f"step_{target}_adam_{codec}.cpp"}
    assert {name for name, _ in generated} == own | {"numbers.cpp"}


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


def test_change_of_a_file_that_a_generated_one_includes_is_built_anew(tiny):
    before = tiny.folder()
    tiny.sources[0].with_name("step_tiny.cpp").write_text("")
    assert tiny.folder() != before


def test_build_into_a_folder_prints_the_path_of_the_op_there(tiny, monkeypatch, tmp_path, capsys):
    unused, into = tmp_path / "unused", tmp_path / "new" / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(unused))
    monkeypatch.setattr(build, "op", lambda: tiny)  # for all targets
    assert cli.main(["build", "--json", "--into", str(into)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert Path(printed["path"]).is_file()
    assert Path(printed["path"]).parent.parent == into
    assert printed["seconds"] > 0
    assert not unused.exists()


def test_build_that_takes_a_while_is_done_once_and_whoever_waits_says_for_whom(
    tiny, tmp_path, monkeypatch, caplog
):
    env, go_on = compiler_in(tmp_path / "bin"), tmp_path / "go_on"
    command = [sys.executable, "-c", LOAD_TINY, str(tiny.sources[0])]
    monkeypatch.setattr(locks, "PATIENCE_S", 0.1)
    wait_for = locks.flock.wait_for
    monkeypatch.setattr(locks.flock, "wait_for", lambda file: [go_on.touch(), wait_for(file)])
    with processes.started(command, STALL=str(go_on), **env) as first:
        wait_until(lambda: compiled(tmp_path / "bin"))
        assert tiny.load().number == 1
        out, err = first.communicate(timeout=60)
    assert (first.returncode, out) == (0, "1\n"), err
    assert len(compiled(tmp_path / "bin")) == len(tiny.sources)
    said = "zero8: compiling its CPU kernel once, about 1 s; `zero8 build` does"
    assert err.count(said) == 1
    (message,) = caplog.messages
    assert f"has waited 0 s for process {first.pid} on {os.uname().nodename}, since " in message


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
        assert tiny.load().number == 1
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
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(whole if cxx == "built" else tmp_path))
    if cxx is not None:
        monkeypatch.setenv("CXX", cxx)
    builder = Zero8AdamBuilder()
    assert builder.is_compatible() is expected
    assert (builder.error_log is None) is expected


def test_op_builder_loads_the_op_that_plain_pytorch_steps_with(monkeypatch):
    module = kernel.module()
    monkeypatch.setenv("CXX", NO_COMPILER)
    assert Zero8AdamBuilder().load(verbose=False) is module
