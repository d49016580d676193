# SPDX-License-Identifier: Apache-2.0
import ctypes
import os
import platform
import re
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor

import kernel_steps
import pytest
import torch
from places import ROOT, SUPPORT
from segments import Place, as_end_of_whole, gradient, make, scalars_at, tensors

from zero8.op import build, kernel
from zero8.op.codec_maps import codec_maps

CSRC = ROOT / "csrc"
COMPILER = [os.environ.get("CXX", "c++"), "-std=c++17", f"-I{CSRC}"]
TARGETS = {"x86_64": ["baseline", "avx2", "avx512"], "aarch64": ["baseline", "neon"]}
OURS = TARGETS[platform.machine()]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# Not optimized as the op is, which would take longer.
QUICK = [*(flag for flag in build.flags() if flag != "-O3"), "-O1"]
# Without optimization compiling takes a fifth of the time, and what is compiled twice as long.
SANITIZERS = ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

on_x86 = pytest.mark.xfail(
    platform.machine() != "x86_64", reason="other processors have other targets", run=False
)


def output_of(command, **env):
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def compile_all(sources, flags, folder, compiler=COMPILER):
    """Compile each source file to folder/STEM.o, two at a time, and return the objects."""
    objects = [folder / f"{source.stem}.o" for source in sources]
    commands = [
        [*compiler, *flags, "-c", source, "-o", made]
        for source, made in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(output_of, commands))
    return objects


def python_headers():
    """Return the flags with which the binding finds Python's headers."""
    return ["-isystem", sysconfig.get_path("include")]


@pytest.fixture(scope="module")
def objects():
    """Folder of the objects that the op is linked from."""
    build.load()
    return build.library().parent


def test_targets_of_the_kernel_are_all_that_there_are():
    names = {name for names in TARGETS.values() for name in names}
    assert {f"step_{name}" for name in names} == {p.stem for p in CSRC.glob("step_*.cpp")}
    rows = re.findall(r'\{"(\w+)", &ZERO8_STEPS\((\w+)\), ', (CSRC / "dispatch.cpp").read_text())
    assert {one for one, other in rows if one == other} == names and len(rows) == len(names)
    assert list(kernel.isas()) == OURS[: len(kernel.isas())]


def test_sources_of_every_instruction_set_compile_without_warnings():
    """As the compiler reads them; test_thread_sanitizer.py has what it finds as it optimizes."""
    flags = [*build.flags(), *WARNINGS, "-fsyntax-only", *python_headers()]
    sources = sorted(CSRC.glob("*.cpp"))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda source: output_of([*COMPILER, *flags, source]), sources))


@pytest.mark.slow
@pytest.mark.parametrize("target", OURS)
def test_object_of_a_target_defines_symbols_of_its_own_only(objects, target):
    # Of equal weak symbols the linker keeps one: AVX-512 code for processors without, perhaps.
    path = objects / f"step_{target}.o"
    lines = output_of(["nm", "-AC", "--extern-only", "--defined-only", path]).splitlines()
    names = [line.split(maxsplit=2)[2] for line in lines]
    own = (f"zero8::{target}::", f"zero8::steps_of_{target}")
    assert names
    assert [name for name in names if not any(part in name for part in own)] == []


def instructions(path):
    """Return the operand text of each instruction by mnemonic."""
    found: dict[str, list[str]] = {}
    for line in output_of(["objdump", "-d", "--no-show-raw-insn", path]).splitlines():
        match = re.match(r"\s+[0-9a-f]+:\s+(\S+)\s*(.*)", line)
        if match:
            found.setdefault(match[1], []).append(match[2])
    return found


@pytest.mark.slow
@on_x86
@pytest.mark.parametrize(
    ("names", "too_wide"),
    [
        ("binding", "%[yz]mm"),
        ("dispatch", "%[yz]mm"),
        ("step_baseline", "%[yz]mm"),
        ("step_avx2", "%zmm"),
    ],
)
def test_object_stays_within_its_instruction_set(objects, names, too_wide):
    paths = list(objects.glob(f"{names}.o"))
    assert paths
    for path in paths:
        for mnemonic, uses in instructions(path).items():
            assert not any(re.search(too_wide, one) for one in uses), (path.name, mnemonic)


@pytest.mark.slow
@pytest.mark.parametrize("isa", kernel.isas())
def test_blocks_beyond_two_to_the_32_elements_are_stepped_like_any_others(objects, tmp_path, isa):
    """In 43 GiB of address space, of which the last two rows are written to."""
    made = compile_all([SUPPORT / "csrc_large.cpp"], ["-O1", "-fPIC"], tmp_path)
    kernels = [objects / "dispatch.o", *objects.glob("step_*.o")]
    output_of([*COMPILER, "-shared", "-fopenmp", *made, *kernels, "-o", tmp_path / "large.so"])
    library = ctypes.CDLL(str(tmp_path / "large.so"))
    rows, hyper = 2**24 + 6, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}
    place = Place((rows, 300), 256, (rows - 2) * 300, 600)
    near = make("log", place, scalars_at(1, hyper))
    near.grad.copy_(gradient(0, 600, seed=1))
    far = as_end_of_whole(near)
    records, scalars = kernel_steps.packed([far])
    arrays = [ctypes.c_void_p(one.ctypes.data) for one in (records, scalars, codec_maps())]
    blocks = [ctypes.c_int64(2 * row) for row in (rows - 2, rows)]
    assert library.step_some_blocks(isa.encode(), *arrays, *blocks) == 0
    kernel_steps.step([near], isa=isa)
    for name, value in tensors(near).items():
        assert torch.equal(tensors(far)[name][-len(value) :], value), name
