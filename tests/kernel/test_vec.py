# SPDX-License-Identifier: Apache-2.0
"""Each operation of each vector vocabulary against csrc/vec_scalar.h, which defines them."""

import ctypes
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from places import SUPPORT
from test_csrc import COMPILER, CSRC, on_x86, output_of

from zero8.op import build, kernel

# Not optimized as the op is, which would take longer: the instructions are the same.
PAIRS = {"load_pair", "store_pair", "load8_pair", "load8_top_pair", "store8_pair"}
FLAGS = [*(flag for flag in build.flags() if flag != "-O3"), "-O1"]


def operations(header: str) -> set[str]:
    """Return the operations of a Vec; of overloaded ones, each with the type that it points to."""
    public = (CSRC / header).read_text().partition("\n private:\n")[0]
    found = re.findall(r"\bstatic \w+ (\w+)\((?:const (\w+)\*)?", public)
    count = Counter(name for name, _ in found)
    return {f"{name}({kind})" if count[name] > 1 else name for name, kind in found}


def operations_of(target: str) -> set[str]:
    """Return the operations that a target of the CPU has."""
    return operations("vec_scalar.h") - (PAIRS if target == "neon" else set())


def header_of(target: str) -> str:
    """Return the name of the header that has the vectors of a target."""
    text = (CSRC / f"step_{target}.cpp").read_text()
    return re.search(r'#include "(vec_\w+\.h)"', text)[1]


def vectors_of(target: str) -> list[str]:
    """Return the options with which a test's source has the vectors of a target."""
    text = (CSRC / f"step_{target}.cpp").read_text()
    defines = [f"-D{name}" for name in re.findall(r"^#define (\w+)$", text, re.M)]
    return [f"-DTARGET={target}", f'-DHEADER="{header_of(target)}"', *defines]


def compiled(target: str, folder, include=CSRC, source="vec_operations.cpp", flags=FLAGS):
    """Return a library of the vectors of a target, whose header `include` has."""
    chosen = re.search(r'GCC target\("([^"]*)"\)', (CSRC / f"step_{target}.cpp").read_text())
    names = chosen[1].split(",") if chosen else []
    command = [*COMPILER[:-1], *flags, *(f"-m{name}" for name in names)]
    command += [f"-I{include}", f"-I{CSRC}", *vectors_of(target)]
    command += ["-fPIC", "-shared", "-fvisibility=default"]
    path = folder / f"{target}.so"
    output_of([*command, SUPPORT / source, "-o", path])
    return ctypes.CDLL(str(path))


def compare(library) -> dict[str, str]:
    library.compared_operations.restype = ctypes.c_char_p
    return compared(library.compared_operations().decode())


def compared(report: str) -> dict[str, str]:
    """Return how the operations compare: those that differ, by name, and in what."""
    lines = report.splitlines()
    numbers = {line.split()[0]: int(line.split()[1]) for line in lines}
    assert len(numbers) == len(lines) and min(numbers.values()) > 1000
    return {line.split()[0]: line.split(maxsplit=2)[2] for line in lines}


def differing(results: dict[str, str]) -> dict[str, str]:
    return {name: result for name, result in results.items() if result != "0"}


@pytest.mark.slow
def test_vec_operations_of_the_cpus_targets_equal_the_definition(tmp_path):
    targets = [name for name in kernel.isas() if name != "baseline"]
    with ThreadPoolExecutor(2) as pool:
        libraries = list(pool.map(lambda target: compiled(target, tmp_path), targets))
    for target, library in zip(targets, libraries, strict=True):
        results = compare(library)
        assert differing(results) == {}, target
        assert set(results) == operations_of(target)


def test_vec_operations_of_cuda_threads_equal_the_definition(host_kernel):
    results = compare(host_kernel.library)
    assert differing(results) == {}
    assert set(results) == operations("vec_scalar.h") & operations("cuda/vec_thread.h")


@pytest.mark.slow
@on_x86
def test_vec_operations_that_are_wrong_are_found(tmp_path):
    """Guards the tests above: unsigned maxima, and pairs stored in order."""
    text = (CSRC / "vec_avx2.h").read_text()
    wrong = {"_mm256_max_epi32": "_mm256_max_epu32", "if (pairs) {": "if (false) {"}
    for right, instead in wrong.items():
        assert text.count(right) == 1
        text = text.replace(right, instead)
    (tmp_path / "vec_avx2.h").write_text(text)
    found = differing(compare(compiled("avx2", tmp_path, tmp_path)))
    assert set(found) == {"maxs", "store8x4", "store8x4_signed", "store8x4_unless_zero"}


def test_vec_operations_are_read_off_the_headers():
    """Guards the tests above."""
    defined = operations("vec_scalar.h")
    assert {"fma", "shl", "load(Half)", "look_up8(float)", "prefetch", "reduce_sum"} <= defined
    assert len(defined) > 75
    not_of_threads = {"store8x4", "load_n(float)", "load8_pair", "prefetch"}
    assert defined - operations("cuda/vec_thread.h") >= not_of_threads
    assert defined <= operations("vec_avx2.h")
    assert operations_of("neon") <= operations("vec_neon.h")
