# SPDX-License-Identifier: Apache-2.0
"""The step on a GPU against the CPU's, bit for bit; with both ways to compile it."""

import kernel_steps
import pytest
import torch
from needs import need_nvcc, need_nvrtc
from segments import (
    CODEC_NAMES,
    DTYPES,
    HYPERS,
    Place,
    assert_same,
    copied,
    factors,
    gradient,
    make,
    scalars_at,
)
from test_cuda_kernel import advance, places

from zero8.spec.segment import Segment

pytestmark = pytest.mark.gpu
ADAMW = HYPERS["adamw"]
# Teams of 8 and 16 threads (parts of a warp), of one warp, of 2, and of 16.
BLOCK_SIZES = [64, 128, 256, 512, 4096]
BACKENDS = {"nvcc": need_nvcc, "nvrtc": need_nvrtc}


def assert_same_numbers(got: Segment, wanted: Segment, label: str) -> None:
    """Bit for bit, but NaN is NaN: processors differ in its sign and in the bits below."""
    got, wanted = copied(got), copied(wanted)
    for segment in (got, wanted):
        segment.param[segment.param.isnan()] = torch.nan
    assert_same(got, wanted, label)


def assert_follows_cpu(segments: list[Segment], hyper: dict, count=3, backend="auto") -> None:
    mine = [copied(segment, "cuda") for segment in segments]
    for step in advance(segments, mine, hyper, count):
        wanted = kernel_steps.step(segments)
        counts = kernel_steps.step_on_gpu(mine, backend)
        for number, (ours, theirs) in enumerate(zip(mine, segments, strict=True)):
            assert_same_numbers(ours, theirs, f"step {step}, segment {number}")
        assert counts.read().tolist() == wanted


@pytest.mark.parametrize("codec", CODEC_NAMES, ids=lambda name: name or "fp32")
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gpu_step_any_dtype_and_place_equals_the_cpu(codec, block_size, backend):
    BACKENDS[backend]()
    segments = [
        make(codec, place, scalars_at(1, ADAMW), *dtypes)
        for place in places(block_size)
        for dtypes in DTYPES.values()
    ]
    assert_follows_cpu(segments, ADAMW, backend=backend)


@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
def test_gpu_step_any_hyperparameters_equal_the_cpu(hyper):
    segments = [
        make(codec, place, scalars_at(1, hyper), dtype)
        for codec in CODEC_NAMES
        for place in places(256)[:3]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert_follows_cpu(segments, hyper)


def test_gpu_step_large_segments_equal_the_cpu_and_repeat():
    """Thread blocks on all multiprocessors; ten launches give the same bits."""
    place = Place((4096, 4096), 256, 0, 2**24)
    segments = [
        make("log", place, scalars_at(1, ADAMW), dtype, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    start = [copied(segment, "cuda") for segment in segments]
    assert_follows_cpu(segments, ADAMW, count=2)
    for segment in start:
        segment.grad.copy_(gradient(0, place.numel, seed=1))
    results = []
    for _ in range(10):
        again = [copied(segment, "cuda") for segment in start]
        kernel_steps.step_on_gpu(again)
        results.append([copied(segment) for segment in again])
    for result in results[1:]:
        for number, pair in enumerate(zip(result, results[0], strict=True)):
            assert_same(*pair, f"segment {number}")


def test_gpu_step_runs_on_the_current_stream():
    """Behind work that the default stream does not wait for."""
    segment = make("log", Place((512, 4096), 256, 0, 2**21), scalars_at(1, ADAMW))
    mine = copied(segment, "cuda")
    grad = gradient(0, 2**21, seed=1)
    segment.grad.copy_(grad)
    kernel_steps.step([segment])
    kernel_steps.step_on_gpu([copied(segment, "cuda")])  # compiled and loaded
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        mine.grad.copy_(grad.pin_memory(), non_blocking=True)
        kernel_steps.step_on_gpu([mine])
    stream.synchronize()
    assert_same(copied(mine), segment, "after the stream's work")


def test_gpu_step_results_around_the_smallest_normal_number_equal_the_cpu():
    """p' = decay * p lies within 2^-22 of 2^-126 on both sides: its rounding decides."""
    scalars = scalars_at(1, ADAMW)._replace(decay=2.0**-60 * (1 + 2.0**-23))
    place = Place((64, 4096), 256, 0, 2**18)
    segment = make(None, place, scalars)
    target = 1 - 2.0**-22 + factors(place.numel, 0, 1, seed=1).abs().double() * 2.0**-23
    segment.param.copy_((target * 2.0**-126 / scalars.decay).float())
    mine = copied(segment, "cuda")
    kernel_steps.step([segment])
    kernel_steps.step_on_gpu([mine])
    assert (segment.param == 2.0**-126).sum() > 100 and (segment.param == 0).sum() > 100
    assert_same(copied(mine), segment, "smallest numbers")
