# SPDX-License-Identifier: Apache-2.0
"""16-bit gradients: every float16 with every stepper, and all times a factor."""

from dataclasses import replace

import pytest
import torch
from segments import (
    CODEC_NAMES,
    Place,
    assert_same,
    copied,
    make,
    scalars_at,
    tensors,
    zero_moment,
)

from zero8.spec import reference
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS
from zero8.spec.grid import BlockGrid
from zero8.spec.segment import Rounding

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
EVERY = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
FINITE, BEYOND = EVERY[EVERY.isfinite()], EVERY[~EVERY.isfinite()]
codec_names = pytest.mark.parametrize("codec", CODEC_NAMES, ids=lambda name: name or "fp32")
# Chunks of four vectors; nothing but a block's tail.
row_lengths = pytest.mark.parametrize("row_length", [64, 7])
hypers = pytest.mark.parametrize("hyper", [ADAMW, {**ADAMW, "decoupled": False}], ids=["", "l2"])


def among_finite(values, row_length):
    """Return three rows for each value, all else in them the largest finite number; float16.

    The first two hold the i-th value once, in column i and i + 1, modulo their length.
    """
    rows = torch.full((len(values), 3, row_length), torch.finfo(torch.float16).max).half()
    number = torch.arange(len(values))
    for row in (0, 1):
        rows[number, row, (number + row) % row_length] = values
    return rows.flatten()


def segments_of(codec, grad, row_length, hyper):
    """Return two segments, a row a block, with float16 gradients and with the same in float32."""
    place = Place((grad.numel(),), 64, 0, grad.numel())
    grid = BlockGrid(-(-grad.numel() // row_length), row_length, 64)
    moments = [zero_moment(codec, rule, grid, place) for rule in ADAM.moments]
    plain = make(None, place, scalars_at(1, hyper))
    wide = replace(plain, codec=CODECS.get(codec), grid=grid, grad=grad.float(), moments=moments)
    return [replace(copied(wide), grad=grad.clone()), wide]


@codec_names
@row_lengths
@hypers
def test_kernel_step_every_finite_half_steps_as_the_same_number_in_float32(
    codec, row_length, hyper, steppers
):
    assert FINITE.numel() == 65536 - 2048
    for name, step in steppers.items():
        half, wide = segments_of(codec, FINITE, row_length, hyper)
        before = half.param.clone()
        assert step([half, wide]) == [0, 0]
        assert_same(half, wide, name)
        assert (half.param != before).all()


@codec_names
@row_lengths
@hypers
def test_kernel_step_every_infinite_or_nan_half_leaves_its_block_as_it_was(
    codec, row_length, hyper, steppers
):
    assert BEYOND.numel() == 2048
    grad = among_finite(BEYOND, row_length)
    left = torch.tensor([True, True, False]).repeat(BEYOND.numel())
    for name, step in steppers.items():
        half, wide = segments_of(codec, grad, row_length, hyper)
        before = copied(half)
        assert step([half, wide]) == [2 * 2048, 2 * 2048]
        assert_same(half, wide, name)
        for key, value in tensors(half).items():
            rows, rows_before = (x.view(len(left), -1) for x in (value, tensors(before)[key]))
            assert torch.equal(rows[left], rows_before[left]), (name, key)
        assert (half.param != before.param).view(-1, row_length)[~left].all()


@row_lengths
def test_reference_step_every_half_steps_as_the_same_number_in_float32(row_length):
    for grad, nonfinite in ((FINITE, 0), (among_finite(BEYOND, row_length), 2 * 2048)):
        half, wide = segments_of("log", grad, row_length, ADAMW)
        assert reference.step(half) == reference.step(wide) == nonfinite
        assert_same(half, wide, "reference")


# --- Factors --------------------------------------------------------------------------------------

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Without betas the first moment is the gradient, and every bit of that matters.
BARE = {"lr": 1e-3, "betas": (0.0, 0.0), "eps": 1e-8, "weight_decay": 0.0}


@pytest.mark.parametrize("factor", [1 / 3, 2.0**-16, 1 / 65536.3, 0.999999, 3.0])
@pytest.mark.parametrize("dtypes", [(FP32, BF16), (FP32, FP16), (BF16, BF16)], ids=str)
def test_kernel_grad_factor_of_every_16_bit_gradient_equals_torch(dtypes, factor, steppers):
    """In the wider dtype; but for gradients and products below 2^-126, which count as 0."""
    factor = torch.tensor(factor).item()
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = patterns.view(dtypes[1])
    smallest = every.float().abs().minimum(every.float().mul(factor).abs())
    every = torch.where((smallest < 2.0**-125) & (smallest != 0), 0.0, every)
    plain = scalars_at(1, BARE)
    place = Place((256, 256), 256, 0, 2**16)
    one = make(None, place, plain._replace(grad_factor=factor), *dtypes, Rounding.DITHER)
    one.grad.copy_(every)
    other = copied(one)
    other.scalars, other.grad = plain, every.to(torch.promote_types(*dtypes)).mul_(factor)
    for name, step in steppers.items():
        mine, theirs = copied(one), copied(other)
        assert step([mine]) == step([theirs])
        theirs.grad = mine.grad
        assert_same(mine, theirs, f"{name}, factor {factor}")
