# SPDX-License-Identifier: Apache-2.0
import os
import platform
import re
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor

import pytest
from places import ROOT, SUPPORT

from zero8.op import build, kernel

CSRC = ROOT / "csrc"
COMPILER = [os.environ.get("CXX", "c++"), "-std=c++17", f"-I{CSRC}"]
TARGETS = {"x86_64": ["baseline", "avx2", "avx512"], "aarch64": ["baseline", "neon"]}
OURS = TARGETS[platform.machine()]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
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


def test_headers_compile_alone_and_twice_where_two_files_include_them(tmp_path):
    # The headers below are meant to be included once per target, so they have no guard.
    source = tmp_path / "twice.cpp"
    source.write_text(
        '#include "format.h"\n#include "format.h"\n'
        '#define ZERO8_TARGET one\n#include "vec_scalar.h"\n#include "step_types.h"\n'
        "#undef ZERO8_TARGET\n"
        '#define ZERO8_TARGET two\n#include "vec_scalar.h"\n#include "step_types.h"\n'
    )
    output_of([*COMPILER, "-fsyntax-only", "-Wall", "-Wextra", source])


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
@pytest.mark.parametrize("mnemonic", ["vfmadd", "vsqrtps", "vdivps"])
@pytest.mark.parametrize(("target", "register"), [("avx2", "%ymm"), ("avx512", "%zmm")])
def test_vector_target_uses_full_width_arithmetic(objects, target, register, mnemonic):
    found = instructions(objects / f"step_{target}.o")
    assert any(
        register in operands
        for name, uses in found.items()
        if name.startswith(mnemonic) and name.endswith("ps")
        for operands in uses
    )


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
@on_x86
def test_blocks_beyond_two_to_the_32_elements_are_stepped_like_any_others(objects, tmp_path):
    """In 34 GiB of address space, of which the last two rows are written to."""
    made = compile_all([SUPPORT / "csrc_large.cpp"], ["-O1"], tmp_path)
    program = tmp_path / "large"
    kernels = [objects / "dispatch.o", *objects.glob("step_*.o")]
    output_of([*COMPILER, "-fopenmp", *made, *kernels, "-o", program])
    assert "baseline" in output_of([program])
