# SPDX-License-Identifier: Apache-2.0
"""Where Python and C++ have different numbers, nothing is built."""

import dataclasses
import re
import subprocess

import pytest
from needs import need_nvrtc
from test_csrc import COMPILER, CSRC

from zero8.op import build, cuda_compile, launch, shared_numbers
from zero8.spec import grid


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))


def test_op_with_another_number_is_another_op_whose_build_is_refused_by_name(
    empty_cache, monkeypatch
):
    before = build.op().folder()
    monkeypatch.setattr(grid, "MAX_BLOCK_SIZE", 8192)
    assert build.op().folder() != before
    numbers = [one for one in build.op().generated if one[0] == "numbers.cpp"]
    check = CSRC / "check.cpp"
    quick = dataclasses.replace(build.op(), sources=(check,), generated=tuple(numbers))
    with pytest.raises(RuntimeError, match="kMaxBlockSize: Python has 8192"):
        quick.load()
    assert not quick.is_built()


def test_cuda_kernel_with_another_number_is_refused_by_name(empty_cache, monkeypatch):
    need_nvrtc()
    monkeypatch.setattr(launch, "PER_THREAD", 16)
    cuda_compile.machine_code.cache_clear()
    with pytest.raises(RuntimeError, match="kPerThread: Python has 16") as caught:
        cuda_compile.machine_code(90, "nvrtc")
    assert "1 error detected" in str(caught.value)  # NVRTC accepts all else


def test_each_shared_number_that_differs_is_named(tmp_path, monkeypatch):
    numbers = shared_numbers.shared_numbers()
    wrong = {name: number + max(1, abs(number)) for name, number in numbers.items()}
    moved = {name: offset + 1 for name, offset in shared_numbers.offsets().items()}
    monkeypatch.setattr(shared_numbers, "shared_numbers", lambda: wrong)
    monkeypatch.setattr(shared_numbers, "offsets", lambda: moved)
    source = tmp_path / "numbers.cpp"
    source.write_text(shared_numbers.op_source())
    command = [*COMPILER, "-fsyntax-only", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    named = re.findall(r"error: static assertion failed: (.*): Python has", done.stderr)
    assert named == [*wrong, *moved]


def test_shared_numbers_are_all_enumerators_and_structs_of_the_kernels_format():
    """Guards the list: what is added to C++ alone is noticed too."""
    text = (CSRC / "format.h").read_text() + (CSRC / "algorithms.h").read_text()
    names = re.findall(r"\bk\w+(?= = \d)", " ".join(re.findall(r"enum .*?;", text)))
    structs = [f"sizeof({name})" for name in re.findall(r"(?:struct|union) (\w+) {", text)]
    inside_only = {"sizeof(Half)", "sizeof(CodecSize)", "sizeof(MomentsOf)"}
    assert len(names) == 17 and len(structs) == 17
    assert {*names, *structs} - inside_only <= set(shared_numbers.shared_numbers())
