# SPDX-License-Identifier: Apache-2.0
"""How the CUDA kernel is called, with a driver that runs it on the host: fake_cuda.py."""

import kernel_steps
import numpy as np
import pytest
import torch
from segments import CODEC_NAMES, Place, assert_same, copied, gradient, make, scalars_at

from zero8.op import cuda, cuda_compile

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def segments_of(block_size: int) -> list:
    segments = [
        make(codec, Place((9, 3000), block_size, 0, 27000), scalars_at(1, ADAMW), dtype)
        for codec in CODEC_NAMES
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for number, segment in enumerate(segments):
        segment.grad.copy_(gradient(0, segment.grad.numel(), seed=number))
    segments[2].grad[[5, 20000]] = torch.inf
    return segments


@pytest.mark.parametrize("block_size", [64, 256, 4096])
def test_cuda_op_compiled_once_by_the_backend_of_the_environment_steps_as_the_cpu(
    block_size, gpu, monkeypatch
):
    monkeypatch.setenv("ZERO8_CUDA_BACKEND", "nvrtc")
    segments = segments_of(block_size)
    mine = [copied(segment) for segment in segments]
    for _ in range(2):
        wanted = kernel_steps.step(segments)
        counts = kernel_steps.step_on_gpu(mine).read()
        assert counts.dtype == np.int64 and counts.tolist() == wanted and sum(wanted) == 2
    for number, pair in enumerate(zip(mine, segments, strict=True)):
        assert_same(*pair, f"segment {number}")
    assert gpu.compiled == [(90, "nvrtc")]


def test_cuda_op_error_of_the_driver_is_raised_with_its_text(gpu, monkeypatch):
    monkeypatch.setattr(cuda_compile, "machine_code", lambda architecture, backend: b"text")
    with pytest.raises(RuntimeError, match="cuModuleLoadData failed: no machine code"):
        kernel_steps.step_on_gpu(segments_of(256))


def test_cuda_op_on_the_cpu_is_refused():
    cuda.cuda_kernel.cache_clear()
    with pytest.raises((ValueError, AssertionError, RuntimeError), match=r"(?i)cuda|nvidia"):
        kernel_steps.step_on_gpu(segments_of(256))
