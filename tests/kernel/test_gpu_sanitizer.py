# SPDX-License-Identifier: Apache-2.0
"""The step on a GPU under the tools of compute-sanitizer."""

import os
import shutil
import sys

import pytest
from processes import run

# Runs in a process of its own, in memory of which each tensor has an allocation to itself.
SMALL_CASE = """\
from itertools import product
import torch
from zero8 import Adam8bitBlockwise
from zero8.spec.codec import CODECS
KINDS = (torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 8)
# Teams of a warp, of two, and of sixteen; a row ends in a short block.
for block_size, codec, (dtype, bits) in product((256, 512, 4096), CODECS, KINDS):
    p = torch.nn.Parameter(torch.ones(5, 4500, dtype=dtype, device="cuda"))
    more = {"block_size": block_size, "codec": codec, "weight_correction_bits": bits}
    optimizer = Adam8bitBlockwise([p], lr=1e-3, **more)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        optimizer.step()
    optimizer.check_finite()
"""
ERRORS_FOUND = 97  # the exit status that we ask for
OPTIONS = {
    "memcheck": ["--kernel-name", "kernel_substring=zero8_step"],
    "racecheck": ["--kernel-name", "kernel_substring=zero8_step"],
    "initcheck": [],  # it has to see that torch's kernels write
}


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer, from CUDA_HOME, PATH or CUDA's usual folder."""
    home = os.environ.get("CUDA_HOME")
    folders = [os.path.join(home, "bin")] if home else []
    folders += [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


@pytest.mark.gpu
@pytest.mark.parametrize("tool", OPTIONS)
def test_gpu_step_under_compute_sanitizer_has_no_errors(tool):
    path = sanitizer()
    if path is None:
        pytest.skip("compute-sanitizer is neither in CUDA_HOME nor on PATH")
    words = [path, "--tool", tool, *OPTIONS[tool], "--error-exitcode", str(ERRORS_FOUND)]
    words += ["--report-api-errors", "no"]  # torch's start calls what may fail
    done = run([*words, sys.executable, "-c", SMALL_CASE], PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    output = done.stdout + done.stderr
    lines = [line for line in output.splitlines() if line.startswith("=========")]
    refusals = [line for line in lines if "not supported" in line or "Unable to" in line]
    if refusals and done.returncode != ERRORS_FOUND:
        pytest.skip(f"compute-sanitizer: {refusals[0]}")
    assert done.returncode == 0, output
    assert any("SUMMARY" in line for line in lines), output
