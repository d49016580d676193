# SPDX-License-Identifier: Apache-2.0
"""The optimizer over parameters on a GPU, against itself on the CPU."""

import pytest
import torch
from int8_weights import int8_param
from small_optimizers import assert_equal
from test_cuda_optimizer import HYPER, assert_same, made, set_grads, states_of
from torch import nn

import zero8
from zero8.spec.codec import CODECS

pytestmark = pytest.mark.gpu
FP32, BF16 = torch.float32, torch.bfloat16
INT8_SHAPES = ((130, 300), (200, 48), (3, 5000))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_gpu_optimizer_steps_equal_those_on_the_cpu_and_never_wait(codec, dtype):
    mine, theirs = made(dtype, "cuda", codec=codec), made(dtype, codec=codec)
    for number in range(4):
        set_grads(mine[0], number)
        set_grads(theirs[0], number)
        theirs[1].step()
        torch.cuda.set_sync_debug_mode("default" if number == 0 else "error")
        try:
            mine[1].step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert_same(mine, theirs)
    assert {p.device.type for p in mine[0]} == {"cuda"}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("rounding", ["dither", "hash", False])
def test_gpu_optimizer_steps_of_int8_weights_equal_those_on_the_cpu(rounding, dtype):
    """Where PyTorch decodes and rounds, and not the kernel."""
    generator = torch.Generator().manual_seed(0)
    theirs = [int8_param(torch.randn(s, generator=generator), dtype) for s in INT8_SHAPES]
    mine = [nn.Parameter(type(p.detach())(p.int_data.cuda(), p.scale.cuda())) for p in theirs]
    settings = HYPER | {"stochastic_rounding": rounding}
    both = [zero8.Adam8bitBlockwise(params, **settings) for params in (mine, theirs)]
    for _ in range(4):
        for p, q in zip(mine, theirs, strict=True):
            q.grad = torch.randn(q.shape, generator=generator).to(dtype)
            p.grad = q.grad.cuda()
        for optimizer in both:
            optimizer.step()
    for p, q in zip(mine, theirs, strict=True):
        assert torch.equal(p.int_data.cpu(), q.int_data) and torch.equal(p.scale.cpu(), q.scale)
    assert_equal(*map(states_of, both))


def test_gpu_optimizer_host_runs_ahead_of_the_gpu():
    """The GPU sleeps; the host has taken its step and been told nothing of the NaN in it."""
    params, optimizer = made(device="cuda")
    set_grads(params, 0)
    for _ in range(2):  # all pinned memory has been allocated then, which may wait for the GPU
        optimizer.step()
        torch.cuda.synchronize()
    done = torch.cuda.Event()
    params[2].grad[3, 5] = torch.nan
    torch.cuda._sleep(500_000_000)
    optimizer.step()
    done.record()
    assert not done.query()
    assert optimizer.nonfinite_blocks == 0
    params[2].grad.zero_()
    torch.cuda.synchronize()
    with pytest.raises(FloatingPointError, match=r"c \(1 blocks\)"):
        optimizer.step()
    optimizer.step()
    with pytest.raises(FloatingPointError, match="1 blocks met a non-finite gradient"):
        optimizer.check_finite()
