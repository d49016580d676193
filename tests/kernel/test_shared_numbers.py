# SPDX-License-Identifier: Apache-2.0
"""Python and C++ have the same numbers, and the same structs."""

import re
import subprocess

import shared_numbers
from needs import need_nvrtc
from test_csrc import COMPILER, CSRC

from zero8.op import cuda, cuda_compile


def test_shared_numbers_of_the_op_are_those_of_python(tmp_path):
    source = tmp_path / "numbers.cpp"
    source.write_text(shared_numbers.op_source())
    done = subprocess.run([*COMPILER, "-fsyntax-only", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_shared_numbers_of_the_cuda_kernel_are_those_of_python(tmp_path, monkeypatch):
    need_nvrtc()
    numbers = shared_numbers.shared_numbers()
    numbers |= {"kPerThread": cuda.PER_THREAD, "kWarp": cuda.WARP}
    path = tmp_path / "step.cu"
    path.write_text(cuda_compile.program().read_text() + shared_numbers.assertions("cuda", numbers))
    monkeypatch.setattr(cuda_compile, "program", lambda: path)
    assert cuda_compile.compiler("nvrtc").compile(90)


def test_shared_numbers_are_all_enumerators_and_structs_of_the_kernels_format():
    """Guards the list: what is added to C++ alone is noticed too."""
    text = (CSRC / "format.h").read_text() + (CSRC / "algorithms.h").read_text()
    names = re.findall(r"\bk\w+(?= = \d)", " ".join(re.findall(r"enum .*?;", text)))
    names += [f"k{name}" for name in re.findall(r"  X\((\w+), \d", text)]
    structs = [f"sizeof({name})" for name in re.findall(r"(?:struct|union) (\w+) {", text)]
    inside_only = {"sizeof(Half)", "sizeof(CodecSize)", "sizeof(MomentsOf)"}
    assert len(names) == 16 and len(structs) == 17
    assert {*names, *structs} - inside_only <= set(shared_numbers.shared_numbers())
