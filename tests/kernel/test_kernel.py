# SPDX-License-Identifier: Apache-2.0
"""The compiled step against `zero8.spec.reference.step`, bit for bit."""

import math

import kernel_steps
import pytest
import torch
from adaptive_samples import near_joint
from segments import (
    CODEC_NAMES,
    DTYPES,
    HYPERS,
    KINDS,
    Place,
    assert_same,
    copied,
    gradient,
    make,
    moment_of,
    scalars_at,
    set_phases,
)

from zero8.spec import reference
from zero8.spec.segment import Rounding, Segment

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
codec_names = pytest.mark.parametrize("codec", CODEC_NAMES, ids=lambda name: name or "fp32")

PLACES = [
    Place((4, 64), 64, 0, 1),
    Place((4, 64), 64, 63, 15),
    Place((4, 64), 64, 3, 17, offset=1),
    Place((4, 100), 64, 37, 255, offset=2),
    Place((3, 300), 256, 299, 257, offset=3),
    Place((3, 257), 256, 1, 255),
    Place((3, 257), 256, 0, 3 * 257),
    Place((2, 5000), 4096, 4095, 3001),
    Place((3, 1068), 512, 511, 2000, offset=4),
    Place((4, 300), 128, 3, 1100),
    Place((9, 64), 256, 0, 9 * 64),
    Place((3, 300), 256, 50, 0),
    Place((2**21, 4096), 256, 5_000_000_000 - 700, 1000),
    Place((2**20, 4100), 4096, 2**32 - 9, 40, offset=1),
    # Narrow rows, which share blocks: whole parameters, and parts of others.
    Place((41, 63), 256, 0, 41 * 63, offset=3),
    Place((40, 1, 3, 3), 64, 0, 360),
    Place((100, 40), 64, 7, 81),
    Place((900, 5), 4096, 4090, 12, offset=2),
    Place((2**31, 3), 256, 5_000_000_000 - 700, 1000),
]


def steps(segments: list[Segment], hyper: dict, count: int):
    """Set gradients, scalars and phases of each step in turn; segments see different kinds."""
    for step in range(1, count + 1):
        scalars = scalars_at(step, hyper)
        for number, segment in enumerate(segments):
            kind = (number + step) % KINDS
            grad = segment.grad
            grad.copy_(gradient(kind, grad.numel(), 100 * step + number, grad.dtype))
            segment.scalars = scalars
            phases = segment.moments[0].phase, segment.param_phase
            set_phases(segment, *((phase + 0x9E3779B9) % 2**32 for phase in phases))
        yield step


def follow(mine: Segment, theirs: Segment) -> None:
    """Take over gradient, scalars and phases."""
    mine.grad.copy_(theirs.grad)
    mine.scalars = theirs.scalars
    set_phases(mine, theirs.moments[0].phase, theirs.param_phase)


def assert_follows_reference(segments: list[Segment], hyper: dict, count: int, steppers) -> None:
    """Step each stepper's copy and the reference, and compare after every step."""
    followers = {name: [copied(segment) for segment in segments] for name in steppers}
    assert followers
    for step in steps(segments, hyper, count):
        wanted = [reference.step(segment) for segment in segments]
        for name, follower in followers.items():
            for mine, theirs in zip(follower, segments, strict=True):
                follow(mine, theirs)
            counts = steppers[name](follower)
            for number, (mine, theirs) in enumerate(zip(follower, segments, strict=True)):
                assert_same(mine, theirs, f"{name}, step {step}, segment {number}")
            assert counts == wanted


LONG_LIVED = [("long beta1", codec, "bf16 from bf16, hash") for codec in ("log", "log6")]


@pytest.mark.parametrize(
    ("name", "codec", "dtypes"),
    [*(("adamw", codec, dtypes) for codec in CODEC_NAMES for dtypes in DTYPES), *LONG_LIVED],
)
def test_kernel_step_any_dtype_place_and_gradient_equals_reference(codec, name, dtypes, steppers):
    hyper, dtypes = HYPERS[name], DTYPES[dtypes]
    segments = [make(codec, place, scalars_at(1, hyper), *dtypes) for place in PLACES]
    assert_follows_reference(segments, hyper, 3, steppers)


def test_kernel_step_log_blocks_between_narrow_and_wide_equal_reference(steppers):
    """Without beta1 the first moment is the gradient; whole blocks, and a tail in every row."""
    place = Place((40, 300), 256, 0, 40 * 300)
    scalars = scalars_at(1, HYPERS["no memory"])
    segment = make("log", place, scalars)
    largest = torch.exp2(torch.linspace(0.0, 1.0, 80))
    blocks = near_joint(largest, 256, seed=2).view(40, 2, 256)
    segment.grad.copy_(torch.cat([blocks[:, 0], blocks[:, 1, :44]], dim=1).flatten())
    followers = {name: copied(segment) for name in steppers}
    reference.step(segment)
    assert 0.2 < (moment_of(segment, "exp_avg").scales < 0).float().mean() < 0.8
    for name, follower in followers.items():
        steppers[name]([follower])
        assert_same(follower, segment, name)


@codec_names
@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
def test_kernel_step_any_hyperparameters_equal_reference(codec, hyper, steppers):
    segments = [
        make(codec, place, scalars_at(1, hyper), dtype, FP32, Rounding.DITHER)
        for place, dtype in zip(PLACES[3:8], (FP32, FP32, BF16, FP32, BF16), strict=True)
    ]
    assert_follows_reference(segments, hyper, 3, steppers)


def test_kernel_step_many_segments_any_threads_give_the_same_bits():
    """One call over segments of all codecs, block sizes and dtypes."""
    hyper = HYPERS["adamw"]
    segments = [
        make(codec, place, scalars_at(1, hyper), *list(DTYPES.values())[number % len(DTYPES)])
        for codec in CODEC_NAMES
        for number, place in enumerate(PLACES)
    ]
    alone = [copied(segment) for segment in segments]
    together = {threads: [copied(segment) for segment in segments] for threads in (2, 5, None)}
    for step in steps(segments, hyper, KINDS):
        for mine, theirs in zip(alone, segments, strict=True):
            follow(mine, theirs)
            kernel_steps.step([mine], num_threads=1)
        for threads, follower in together.items():
            for mine, theirs in zip(follower, segments, strict=True):
                follow(mine, theirs)
            kernel_steps.step(follower, num_threads=threads)
            for number, pair in enumerate(zip(follower, alone, strict=True)):
                assert_same(*pair, f"{threads} threads, step {step}, segment {number}")


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_kernel_step_special_parameters_equal_reference(dtypes, steppers):
    """NaN, infinite, subnormal and largest parameters under finite gradients."""
    values = [math.nan, -math.nan, math.inf, -math.inf, 2.0**-130, -(2.0**-149), 3.38e38, -3.4e38]
    segment = make("log", PLACES[5], scalars_at(1, HYPERS["adamw"]), *dtypes)
    segment.param[7 : 7 + len(values)] = torch.tensor(values)
    assert_follows_reference([segment], HYPERS["adamw"], 2, steppers)
    assert segment.param[7:9].isnan().all() and segment.param[9:11].isinf().all()


@pytest.mark.parametrize("rounding", [Rounding.DITHER, Rounding.HASH], ids=lambda r: r.name)
def test_kernel_step_stochastic_rounding_never_makes_infinity(rounding):
    """Half a bfloat16 ulp, 2^119, beyond the largest number: up is infinite, so it is truncated."""
    hyper = {"lr": 2.0**119, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}
    segment = make("log", PLACES[6], scalars_at(1, hyper), BF16, FP32, rounding)
    largest = torch.tensor(0x7F7F, dtype=torch.int16).view(BF16)
    segment.param.fill_(largest)
    segment.param[1::2] *= -1
    segment.grad.copy_(-segment.param.sign())
    mine, before = copied(segment), segment.param.clone()
    reference.step(segment)
    kernel_steps.step([mine])
    assert_same(mine, segment, rounding.name)
    assert torch.equal(mine.param, before)
    # To nearest it is infinite: the update is what it should be.
    mine.rounding = Rounding.NEAREST
    kernel_steps.step([mine])
    assert mine.param.isinf().all()
