# SPDX-License-Identifier: Apache-2.0
import os
import platform
import re
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from pathlib import Path

import pytest
import torch
from places import ROOT, SUPPORT
from torch.utils import cpp_extension

from zero8.algorithms.table import ELEMENTWISE
from zero8.op import build, kernel
from zero8.op.structs import FLOAT32_MOMENTS
from zero8.spec.codec import CODECS

CSRC = ROOT / "csrc"
# torch 2.8, the oldest that zero8 allows, builds extensions as C++17.
COMPILER = [*cpp_extension.get_cxx_compiler().split(), "-std=c++17", f"-I{CSRC}"]
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
    """Return the flags with which the binding finds pybind11's headers and Python's."""
    include = [Path(torch.__file__).parent / "include", sysconfig.get_path("include")]
    return [word for path in include for word in ("-isystem", path)]


@pytest.fixture(scope="module")
def objects():
    """Folder of the objects that the builder has made: of each target, algorithm and codec one."""
    build.op().load()
    return build.op().folder()


def test_targets_of_the_build_are_all_that_there_are():
    targets = list(dict.fromkeys(chain(*build.TARGETS_OF.values())))
    assert {f"step_{name}" for name in targets} == {p.stem for p in CSRC.glob("step_*.cpp")}
    pattern = r'\{"(\w+)", \{\{\}, ZERO8_ALGORITHMS\(ZERO8_LIST_(?:VBMI_)?STEPS, (\w+)\)\}, '
    rows = re.findall(pattern, (CSRC / "dispatch.cpp").read_text())
    assert rows == [(name, name) for name in targets]


def test_op_has_the_steps_of_all_targets_algorithms_and_codecs():
    codecs = [FLOAT32_MOMENTS, *(codec.number for codec in CODECS.values())]
    every = {*product(build.TARGETS, (one.number for one in ELEMENTWISE), codecs)}
    assert {*build.op().load().steps()} == every


def test_targets_that_the_build_takes_for_served_are_those_that_the_op_serves():
    assert build.served_targets() == list(kernel.isas())


def test_sources_of_every_instruction_set_compile_without_warnings():
    """As the compiler reads them; test_thread_sanitizer.py has what it finds as it optimizes."""
    name = "-DTORCH_EXTENSION_NAME=zero8_adam"
    flags = [*build.FLAGS, *WARNINGS, "-fsyntax-only", name, *python_headers()]
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
    output_of([*COMPILER, "-fopenmp", "-fsyntax-only", "-Wall", "-Wextra", source])


@pytest.mark.slow
@pytest.mark.parametrize("target", build.TARGETS)
def test_object_of_a_target_defines_symbols_of_its_own_only(objects, target):
    # Of equal weak symbols the linker keeps one: AVX-512 code for processors without, perhaps.
    stems = [Path(name).stem for name, _ in build.op().generated]
    paths = [objects / f"{stem}.o" for stem in stems if stem.startswith(f"step_{target}_")]
    assert paths
    lines = output_of(["nm", "-AC", "--extern-only", "--defined-only", *paths]).splitlines()
    names = [line.split(maxsplit=2)[2] for line in lines]
    own = (f"zero8::{target}::", f"zero8::step_blocks_{target}_")
    assert len(names) >= len(paths)
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
    found = instructions(objects / f"step_{target}_adam_log.o")
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
        ("step_baseline_*", "%[yz]mm"),
        ("step_avx2_*", "%zmm"),
    ],
)
def test_object_stays_within_its_instruction_set(objects, names, too_wide):
    paths = list(objects.glob(f"{names}.o"))
    assert paths
    for path in paths:
        for mnemonic, uses in instructions(path).items():
            assert not any(re.search(too_wide, one) for one in uses), (path.name, mnemonic)


def targets_by_code():
    """Return the targets that this processor serves, together with those whose code they share."""
    served = build.served_targets()
    groups = {one: [one] for one in served}
    for target in served:
        shared = build.compiled_target(target, CODECS["log"])
        if shared != target:
            groups[shared] += groups.pop(target)
    return list(groups.values())


@pytest.mark.slow
@pytest.mark.parametrize("targets", targets_by_code(), ids=" ".join)
def test_kernels_under_the_sanitizers_find_nothing(targets, tmp_path):
    # The driver steps over Adam's segments, as what reads and writes memory is one template for all
    # algorithms, in all codecs.
    names = {f"step_{target}_adam_{codec}" for target in targets for codec in ("float32", *CODECS)}
    sources = [CSRC / "dispatch.cpp", SUPPORT / "csrc_driver.cpp"]
    sources += [path for path in build.op().written(tmp_path) if path.stem in names]
    flags = [*SANITIZERS, "-fopenmp", "-ffp-contract=off"]
    made = compile_all(sources, flags, tmp_path)
    program = tmp_path / "driver"
    output_of([*COMPILER, *flags, *made, "-o", program])
    # Looking for leaks needs ptrace, which containers may forbid.
    assert output_of([program], ASAN_OPTIONS="detect_leaks=0").split() == targets


@pytest.mark.slow
@on_x86
def test_blocks_beyond_two_to_the_32_elements_are_stepped_like_any_others(objects, tmp_path):
    """In 34 GiB of address space, of which the last two rows are written to."""
    made = compile_all([SUPPORT / "csrc_large.cpp"], ["-O1"], tmp_path)
    program = tmp_path / "large"
    kernels = [objects / "dispatch.o", *objects.glob("step_*_adam_*.o")]
    output_of([*COMPILER, "-fopenmp", *made, *kernels, "-o", program])
    assert "baseline" in output_of([program])
