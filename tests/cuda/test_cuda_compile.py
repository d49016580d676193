# SPDX-License-Identifier: Apache-2.0
"""What can be known of the compiled CUDA kernel without a GPU.

Those that need nvcc or NVRTC are skipped without it, but not in CI: the dev extra has both.
"""

import re
import subprocess
import sys
from functools import lru_cache

import pytest
from needs import need_nvcc, need_nvrtc
from places import ROOT

from zero8.op import cuda_compile
from zero8.op.cuda import kernel_of
from zero8.spec.algorithms import ALGORITHMS

# Each takes a minute to compile for.
ARCHITECTURES = [pytest.param(number, marks=pytest.mark.slow) for number in (90, 80, 100)]
# Three thread blocks of 256 threads, or five of 128, have place on a multiprocessor.
MOST_REGISTERS = 96

# All that floats may go through: one rounding each, to nearest, or none.
ROUNDING = {"fma.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32", "rcp.rn.f32"}
ROUNDING |= {"add.rn.f32"}  # an fma by 1; with its rounding named, it is not contracted
EXACT = {"abs.f32", "neg.f32", "min.f32", "max.f32", "mov.f32", "selp.f32"}
EXACT |= {"min.NaN.f32", "max.NaN.f32"}
CONVERSIONS = {"cvt.rn.f32.s32", "cvt.rn.f32.u32", "cvt.rni.s32.f32", "cvt.rzi.s32.f32"}
CONVERSIONS |= {"cvt.rzi.u32.f32", "cvt.rn.f32.u16"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return a function: of an architecture, the PTX that nvcc made for it, and nvcc's report."""

    @lru_cache
    def compile_for(architecture):
        folder = tmp_path_factory.mktemp("nvcc")
        need_nvcc()
        options = ["-Werror", "all-warnings", "-Xptxas=-v", "--keep", f"--keep-dir={folder}"]
        options += ["-c", "-o", str(folder / "step.o")]
        command = cuda_compile.nvcc_command(cuda_compile.nvcc(), architecture, *options)
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        (ptx,) = folder.glob("*.ptx")
        return ptx.read_text(), done.stdout + done.stderr

    return compile_for


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: one.name)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cuda_kernel_needs_registers_only(compiled, architecture, algorithm):
    """Neither spills nor arrays that went to memory; few enough registers for 20 warps, or 16."""
    _, report = compiled(architecture)
    (entry,) = re.findall(
        rf"Compiling entry function '{kernel_of(algorithm)}' for 'sm_{architecture}'\n.*\n"
        r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r"ptxas info\s*: Used (\d+) registers, used (\d+) barriers",
        report,
    )
    stack, stores, loads, registers, barriers = map(int, entry)
    assert (stack, stores, loads) == (0, 0, 0)
    assert registers <= (MOST_REGISTERS if len(algorithm.moments) < 3 else 128)
    assert barriers == 3  # of __syncthreads and of two teams; all 16 if one were not constant


def instructions(ptx: str) -> set[str]:
    """Return the opcodes without predicates, labels, operands and vector widths."""
    lines = re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_:]+)*)\s", ptx, re.M)
    return set(lines)


def assert_ieee_only(ptx: str) -> None:
    found = instructions(ptx)
    of_floats = {name for name in found if ".f32" in name or ".f64" in name or ".f16" in name}
    moves = {name for name in of_floats if name.startswith(("ld.", "st.", "setp.", "set."))}
    assert of_floats - moves <= ROUNDING | EXACT | CONVERSIONS
    assert {"fma.rn.f32", "sqrt.rn.f32", "div.rn.f32"} <= found
    assert not [name for name in found if "ftz" in name or "approx" in name]
    assert not [name for name in found if ".local" in name]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cuda_ptx_has_ieee_arithmetic_only(compiled, architecture):
    ptx, _ = compiled(architecture)
    assert_ieee_only(ptx)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of compiled kernels."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    cuda_compile.machine_code.cache_clear()
    yield tmp_path / "cache"
    cuda_compile.machine_code.cache_clear()


@pytest.mark.parametrize(("backend", "need"), [("nvcc", need_nvcc), ("nvrtc", need_nvrtc)])
@pytest.mark.slow
def test_cuda_both_backends_compile_the_same_source_for_the_device(cache, backend, need):
    need()
    code = cuda_compile.machine_code(90, backend)
    assert code.startswith(b"\x7fELF")
    symbols = set(re.findall(rb"\0(zero8_step_\w+)(?=\0)", code))
    assert symbols == {kernel_of(one).encode() for one in ALGORITHMS}
    (path,) = cache.glob(f"zero8_cuda/step_sm_90_*_{backend}_*.cubin")
    assert path.read_bytes() == code
    assert path.stat().st_mode & 0o777 == 0o644  # another user's processes load it


def test_cuda_code_of_the_cache_is_used_until_sources_change(cache, monkeypatch, tmp_path):
    need_nvrtc()
    # NVRTC itself compiles for twenty seconds.
    quick = cuda_compile.compiler("nvrtc")._replace(compile=lambda architecture: b"\x7fELF, quick")
    with monkeypatch.context() as patch:
        patch.setattr(cuda_compile, "_nvrtc", lambda: quick)
        code = cuda_compile.machine_code(90, "nvrtc")
    cuda_compile.machine_code.cache_clear()
    wrong = tmp_path / "step.cu"
    wrong.write_text("#error not compiled again")
    monkeypatch.setattr(cuda_compile, "program", lambda: wrong)
    assert cuda_compile.machine_code(90, "nvrtc") == code
    for path in sorted((ROOT / "csrc").rglob("*.h")):
        copy = tmp_path / path.relative_to(ROOT / "csrc")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (tmp_path / "codes.h").write_text("// another one\n")
    monkeypatch.setattr(cuda_compile.build, "source_folder", lambda: tmp_path)
    cuda_compile.machine_code.cache_clear()
    with pytest.raises(RuntimeError, match="NVRTC failed:(.|\n)*not compiled again"):
        cuda_compile.machine_code(90, "nvrtc")
    cuda_compile.machine_code.cache_clear()


@pytest.mark.slow
def test_cuda_nvrtc_ptx_has_ieee_arithmetic_only():
    need_nvrtc()
    from cupy.cuda import nvrtc

    folders = [ROOT / "csrc", ROOT / "csrc" / "cuda" / "nvrtc"]
    program = nvrtc.createProgram(cuda_compile.program().read_text(), "step.cu", (), ())
    options = [*cuda_compile.FLAGS, "-arch=compute_90", *(f"-I{folder}" for folder in folders)]
    nvrtc.compileProgram(program, options)
    ptx = nvrtc.getPTX(program)
    assert_ieee_only(ptx if isinstance(ptx, str) else ptx.decode())


def test_cuda_auto_takes_nvcc_and_else_nvrtc(monkeypatch):
    need_nvcc()
    need_nvrtc()
    assert cuda_compile.compiler("auto").name == "nvcc"
    assert cuda_compile.compiler("nvrtc").name == "nvrtc"
    monkeypatch.setattr(cuda_compile, "nvcc", lambda: None)
    assert cuda_compile.compiler("auto").name == "nvrtc"
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-nvcc"):
        cuda_compile.compiler("nvcc")
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(RuntimeError, match=r"pip install 'zero8\[cuda\]'"):
        cuda_compile.compiler("auto")


def test_cuda_unknown_backend_and_old_device_are_refused():
    with pytest.raises(ValueError, match="backend: got 'hip', expected one of .*'nvrtc'"):
        cuda_compile.machine_code(90, "hip")
    with pytest.raises(ValueError, match="compute capability 7.5, expected at least 8.0"):
        cuda_compile.machine_code(75, "auto")
