# SPDX-License-Identifier: Apache-2.0
"""The kernel compiled for aarch64, and emulated, against this processor's, bit for bit.

ARM flushes results before they are rounded, x86 afterwards: they differ where a result is rounded
up to 2^-126.  Both targets see to that, each in its own way.
"""

import math
import random
from dataclasses import replace

import kernel_steps
import pytest
import torch
from needs import AARCH64_COMPILER, AARCH64_EMULATOR, need_aarch64
from piped_kernel import PipedKernel
from places import SUPPORT
from segments import (
    BF16,
    CODEC_NAMES,
    DTYPES,
    FP32,
    HYPERS,
    Place,
    assert_same,
    copied,
    factors,
    make,
    moment_of,
    scalars_at,
    tensors,
)
from test_csrc import COMPILER, CSRC, QUICK, TARGETS, WARNINGS, compile_all, output_of
from test_int8_kernel import DTYPES as ROWS
from test_kernel import PLACES, steps
from test_param_copy import FP16, with_copy
from test_random_steps import STEPS, hyper_of, prepare, segment_of
from torch import Tensor

from zero8.op import build, kernel
from zero8.spec import arithmetic as ieee
from zero8.spec.adam import ADAM
from zero8.spec.ademamix import ADEMAMIX
from zero8.spec.codec import CODECS, MomentCode
from zero8.spec.lion import LION
from zero8.spec.log import LogCode, SignedLogCode
from zero8.spec.packing import packed
from zero8.spec.segment import Segment
from zero8.spec.sgd import SGD

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

CROSS_COMPILER = [AARCH64_COMPILER, *COMPILER[-2:]]
RANDOM_CASES = 400
REST = ["check", "dispatch", "fill", "norm"]
"""The kernel but for its steps and its binding."""
# The kernels refer to OpenMP weakly, for which nothing is taken out of an archive.
THREADS = ["-fopenmp", "-Wl,-u,GOMP_parallel"]
TINY = 2.0**-126


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The command of the program that has the kernel in it, compiled as the op is.

    To save minutes, only the steps with NEON are optimized as much.
    """
    need_aarch64()
    folder = tmp_path_factory.mktemp("aarch64")
    optimized = [CSRC / f"{name}.cpp" for name in (*REST, "step_neon")]
    made = compile_all(optimized, [*build.flags(), *WARNINGS], folder, CROSS_COMPILER)
    quick = [SUPPORT / "piped_kernel.cpp", CSRC / "step_baseline.cpp"]
    made += compile_all(quick, [*QUICK, *WARNINGS], folder, CROSS_COMPILER)
    output_of([*CROSS_COMPILER, *THREADS, "-static", *made, "-o", folder / "program"])
    return [AARCH64_EMULATOR, str(folder / "program")]


@pytest.fixture(scope="module", params=TARGETS["aarch64"])
def arm(command, request):
    return PipedKernel(command, request.param)


@pytest.fixture(scope="module")
def neon(command):
    return PipedKernel(command, "neon")


# --- Operations ----------------------------------------------------------------------------------


def is_rounded_up(exact: Tensor) -> Tensor:
    """Return which binary64 numbers below 2^-126 become 2^-126 with 24 bits and any exponent."""
    return (exact.abs() < TINY) & (exact.abs() >= TINY - 2.0**-151)


def assert_defined(arm: PipedKernel, a: Tensor, b: Tensor, c: Tensor) -> dict[str, Tensor]:
    """Compare operations with their definition, NaN being NaN; return what is defined."""
    wanted = {
        "mul": ieee.mul(a, b),
        "fma": ieee.fma(a, b, c),
        "fms": ieee.fma(a, b, -c),
        "div": ieee.div(a, b),
        "sqrt": ieee.sqrt(a),
    }
    for name, got in arm.operations(a, b, c).items():
        same = got.view(torch.int32) == wanted[name].view(torch.int32)
        same |= got.isnan() & wanted[name].isnan()
        wrong = [x[~same][:3].tolist() for x in (a, b, c, got, wanted[name])]
        assert same.all(), f"{name}: a, b, c, got, expected {wrong}"
    return wanted


def test_aarch64_operations_on_numbers_of_all_exponents_equal_the_definition(arm):
    special = [0.0, 2.0**-149, TINY - 2.0**-149, TINY, 1.0, 2.0**64, 3.4e38, math.inf, math.nan]
    special = torch.tensor([sign * x for x in special for sign in (1, -1)])
    assert_defined(arm, *torch.cartesian_prod(special, special, special).T.contiguous())
    assert_defined(arm, *(factors(200_000, -150, 128, seed) for seed in range(3)))


def test_aarch64_operations_around_the_smallest_normal_number_equal_the_definition(arm):
    """Products, quotients and sums within 2^-22 of 2^-126 on both sides."""
    count = 200_000
    target = factors(count, 0, 1, seed=1).abs().double() * 2.0**-23 + (1 - 2.0**-22)
    target = target * TINY
    a = factors(count, -126, 2, seed=2)
    b = (target / a.double()).float()
    assert is_rounded_up(a.double() * b.double()).sum() > count / 100
    assert_defined(arm, a, b, torch.zeros(count))
    assert_defined(arm, a, (a.double() / target).float(), a)
    for low in (-50, -70):
        a, b = factors(count, low, low + 10, seed=3), factors(count, low, low + 10, seed=4)
        c = (target - a.double() * b.double()).float()
        sums = assert_defined(arm, a, b, c)["fma"]
    exact = a.double() * b.double() + c.double()
    assert ((sums.abs() == TINY) & is_rounded_up(exact)).sum() > count / 100


# --- Steps ---------------------------------------------------------------------------------------


def corrected(segment: Segment) -> Segment:
    """Return a copy with corrections of its own, of any value."""
    correction = torch.arange(segment.param.numel()).to(torch.int8)
    return replace(copied(segment), correction=correction)


def with_one_nan(segment: Segment) -> Segment:
    """Replace every NaN by the same one: a NaN that is made has another sign on each processor."""
    for x in tensors(segment).values():
        if x.is_floating_point():
            x[x.isnan()] = math.nan
    return segment


def step_everywhere(arm: PipedKernel, segments: list[Segment]) -> list[int]:
    """Take a step on ARM and on every instruction set here, and compare."""
    before = [copied(segment) for segment in segments]
    counts = arm.step(segments)
    for isa in kernel.isas():
        mine = [copied(segment) for segment in before]
        assert kernel_steps.step(mine, isa=isa) == counts
        for number, (theirs, ours) in enumerate(zip(segments, mine, strict=True)):
            assert_same(with_one_nan(theirs), with_one_nan(ours), f"{isa}, segment {number}")
    return counts


@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
def test_aarch64_step_any_codec_dtype_place_and_gradient_equals_x86(neon, hyper):
    """Each kind of dtypes in a third of the places: the hyperparameters together in all.

    And INT8 weights, of whole rows.
    """
    shift = list(HYPERS.values()).index(hyper)
    segments = [
        make(codec, place, scalars_at(1, hyper), *dtypes)
        for codec in CODEC_NAMES
        for number, dtypes in enumerate(DTYPES.values(), shift)
        for place in PLACES[number % 3 :: 3]
    ]
    segments += [corrected(one) for one in segments if one.param.dtype == BF16]
    segments += [
        with_copy(copied(one), (BF16, FP16)[number % 2])
        for number, one in enumerate(segments)
        if one.param.dtype == FP32
    ]
    segments += [
        make(codec, place, scalars_at(1, hyper), torch.int8, *dtypes, row_scales_dtype=scales)
        for codec in (None, "log", "log6")
        for scales, *dtypes in ROWS.values()
        for place in (Place((7, 300), 256, 300, 1500, offset=3), Place((40, 17), 64, 0, 680))
    ]
    for _ in steps(segments, hyper, 2):
        step_everywhere(neon, segments)


def test_aarch64_random_steps_of_all_algorithms_equal_x86(neon):
    """Cases of test_random_steps.py, all of a step in one run of the program."""
    chances = [random.Random(number) for number in range(RANDOM_CASES)]
    hypers = [hyper_of(number, chance) for number, chance in enumerate(chances)]
    segments = list(map(segment_of, hypers, chances))
    assert {segment.algorithm for segment in segments} == {ADAM, ADEMAMIX, LION, SGD}
    for step in range(1, STEPS + 1):
        for segment, hyper, chance in zip(segments, hypers, chances, strict=True):
            prepare(segment, hyper, chance, step)
        step_everywhere(neon, segments)


def test_aarch64_step_special_parameters_and_gradients_equal_x86(arm):
    """NaN, infinite, subnormal and largest ones; a block with such a gradient stays as it was."""
    values = [math.nan, -math.nan, math.inf, -math.inf, 2.0**-130, -(2.0**-149), 3.38e38, -3.4e38]
    made = [
        make(codec, place, scalars_at(1, HYPERS[hyper]), *dtypes)
        for hyper in ("adamw", "l2")
        for codec in CODEC_NAMES
        for dtypes in DTYPES.values()
        for place in PLACES[4:6]
    ]
    made += [corrected(one) for one in made if one.param.dtype == BF16]
    for number, segment in enumerate(made):
        segment.param[7 : 7 + len(values)] = torch.tensor(values)
        segment.grad.copy_(factors(segment.grad.numel(), -8, 8, number))
    poisoned = [copied(segment) for segment in made]
    for number, segment in enumerate(poisoned):
        segment.grad[-1] = [math.nan, math.inf, 2.0**63][number % 3]
    assert sum(step_everywhere(arm, made)) > 0  # those with L2
    assert min(step_everywhere(arm, poisoned)) > 0


# --- Steps next to the smallest normal number ----------------------------------------------------

NEIGHBOURS = torch.arange(-3, 4, dtype=torch.int32)


def next_to_tiny(factors: Tensor | float) -> Tensor:
    """Return (..., 7) float32 that times each of `factors` lie on both sides of 2^-126."""
    nearest = (TINY / torch.as_tensor(factors).double()).float().view(torch.int32)
    return (nearest[..., None] + NEIGHBOURS).view(FP32)


def blocks_next_to_tiny(code: MomentCode, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a code for each block of 7, their scales, and which are rounded up when decoded."""
    positive = torch.arange(1, 2 ** (code.bits - 1))
    if isinstance(code, LogCode):
        # Blocks that span the fewest octaves.
        parts = code.bits - 4
        step, values = (code.MIN_SPAN << parts) // (2**code.bits - 2), next_to_tiny(beta)
        above = ((2**code.bits - 1) * step >> parts) - (positive * step >> parts)[:, None]
        high = values.view(torch.int32) + above.int()
        scales = torch.stack([high.view(FP32), torch.full(high.shape, float(step))], dim=2)
        return positive, scales, is_rounded_up(values.double() * beta).expand(high.shape)
    codes = positive + 128 if code is CODECS["dynamic"].of_signed else positive
    levels = (code.narrow if isinstance(code, SignedLogCode) else code).levels[codes]
    scales = next_to_tiny(levels * beta)
    exact = ieee.mul(scales, beta).double() * levels.double()[:, None]
    return codes, scales, is_rounded_up(exact)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_aarch64_step_moments_decoded_next_to_the_smallest_normal_number_equal_x86(arm, codec):
    """A block for each level, in which every second element has a moment.

    None of fp8, of log6's exp_avg and of linear4's exp_avg_sq is rounded up, which takes a product
    of less than a quarter of an ulp below 2^-126.  With a level's significand of 8 to 15 and a
    scale's of 24 bits, that is more than 2^27 - 4 out of 2^27, and the nearest products below it
    are 2^27 - 7.
    """
    segments, rounded_up = [], {"exp_avg": 0, "exp_avg_sq": 0}
    for betas in torch.rand(16, 2, generator=torch.Generator().manual_seed(1)).tolist():
        scalars = scalars_at(1, {**HYPERS["adamw"], "betas": betas})
        num_rows = (2 ** (codec.of_signed.bits - 1) - 1) * len(NEIGHBOURS)
        segment = make(codec.name, Place((num_rows, 64), 64, 0, num_rows * 64), scalars)
        for name, beta in (("exp_avg", scalars.beta1), ("exp_avg_sq", scalars.beta2)):
            code, moment = codec.code_of(ADAM.moment(name)), moment_of(segment, name)
            codes, scales, hits = blocks_next_to_tiny(code, beta)
            rows = codes.repeat_interleave(len(NEIGHBOURS))
            in_place = torch.zeros(num_rows, 64, dtype=torch.uint8)
            in_place[:, ::2] = rows[:, None].to(torch.uint8)
            stored = packed(in_place.flatten(), segment.grid, 0, code.bits)
            moment.values.copy_(stored)
            moment.scales.copy_(scales.reshape(moment.scales.shape))
            rounded_up[name] += int(hits.sum())
        segments.append(segment)
    nearest = {"fp8": ["exp_avg", "exp_avg_sq"], "log6": ["exp_avg"], "linear4": ["exp_avg_sq"]}
    never = nearest.get(codec.name, [])
    for name, count in rounded_up.items():
        assert count == 0 if name in never else count > 20, name
    step_everywhere(arm, segments)


def test_aarch64_step_floats_next_to_the_smallest_normal_number_equal_x86(arm):
    """Parameters and float32 moments, which decay to it."""
    segments, count = [], 200
    random = 0.5 + 0.5 * torch.rand(count, 3, generator=torch.Generator().manual_seed(1))
    for beta1, beta2, decay in random.tolist():
        scalars = scalars_at(1, {**HYPERS["adamw"], "betas": (beta1, beta2)})
        scalars = scalars._replace(decay=decay)
        numbers = len(NEIGHBOURS)
        segment = make(None, Place((4 * numbers,), 64, 0, 4 * numbers), scalars)
        # Numbers, the same negative, and zeros: a moment that is not 0 moves a parameter far.
        segment.param[: 2 * numbers] = torch.cat([next_to_tiny(decay), -next_to_tiny(decay)])
        moment_of(segment, "exp_avg").values[2 * numbers :] = next_to_tiny(scalars.beta1).repeat(2)
        moment_of(segment, "exp_avg_sq").values[2 * numbers :] = next_to_tiny(scalars.beta2).repeat(
            2
        )
        moment_of(segment, "exp_avg").values[3 * numbers :] *= -1
        segments.append(segment)
    step_everywhere(arm, segments)
    for name in ("param", "exp_avg", "exp_avg_sq"):
        after = torch.cat([tensors(segment)[name] for segment in segments])
        assert (after.abs() == TINY).sum() > count
