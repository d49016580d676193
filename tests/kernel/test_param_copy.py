# SPDX-License-Identifier: Apache-2.0
"""The 16-bit copy of a parameter that the step writes is torch's copy_ of the parameter."""

import kernel_steps
import pytest
import torch
from segments import (
    CODEC_NAMES,
    Place,
    assert_steps_inside,
    copied,
    gradient,
    make,
    scalars_at,
)

from zero8.op import kernel
from zero8.spec import reference

# The last but one has several of the parts in which bfloat16 parameters are copied.
PLACES = [
    Place((4, 64), 64, 0, 1),
    Place((4, 100), 64, 37, 255, offset=2),
    Place((3, 300), 256, 299, 257, offset=3),
    Place((3, 257), 256, 0, 3 * 257),
    Place((2, 5000), 4096, 4095, 3001),
    Place((600, 70), 64, 33, 40_001),
    Place((3, 300), 256, 50, 0),
]
BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
# Dtypes of parameter, gradient and copy.
ALL_DTYPES = [
    *((torch.float32, grad, copy) for grad in (torch.float32, BF16, FP16) for copy in (BF16, FP16)),
    *((BF16, grad, BF16) for grad in (torch.float32, BF16)),
]
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
FROZEN = {"lr": 0.0, "betas": (0.0, 0.0), "eps": 1e-8, "weight_decay": 0.0}


def with_copy(segment, dtype):
    """Return the segment with a copy that has not been written yet."""
    segment.copy = torch.full((segment.param.numel() + 1,), 77.0, dtype=dtype)[1:]
    return segment


@pytest.mark.parametrize("dtypes", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODEC_NAMES, ids=str)
def test_kernel_copy_of_any_place_equals_reference_and_stays_inside(codec, dtypes):
    param_dtype, grad_dtype, dtype = dtypes
    for place in PLACES:
        made = make(codec, place, scalars_at(1, ADAM), param_dtype, grad_dtype)
        segment = with_copy(made, dtype)
        segment.grad.copy_(gradient(0, place.numel, seed=3))
        steppers = kernel_steps.on_every_isa(num_threads=3)
        assert_steps_inside(segment, lambda ones: reference.step(*ones), steppers, str(place))
        assert torch.equal(segment.copy, segment.param.to(dtype))


@DTYPES
def test_kernel_copy_of_every_kind_of_float_equals_torch(dtype):
    """Parameters around every 16-bit number and every tie, stepped with a rate of 0.

    A step reads subnormal parameters as 0 and writes what it has read.
    """
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    bits = patterns.view(torch.int32)
    step = 1 << (16 if dtype == BF16 else 13)
    around = [bits, *(bits + shift for shift in (-1, 1, step // 2 - 1, step // 2, step // 2 + 1))]
    param = torch.cat(around).view(torch.float32)
    param = torch.where(param.abs() < 2.0**-126, 0.0, param)
    place = Place((6 * 2**8, 2**8), 256, 0, 6 * 2**16)
    segment = with_copy(make("log", place, scalars_at(1, FROZEN)), dtype)
    segment.param.copy_(param)
    wanted = param.to(dtype)
    for isa in kernel.isas():
        mine = copied(segment)
        kernel_steps.step([mine], isa=isa)
        finite = ~param.isnan()
        assert torch.equal(mine.copy.view(torch.int16)[finite], wanted.view(torch.int16)[finite])
        assert mine.copy[~finite].isnan().all()


def test_kernel_copy_of_a_corrected_parameter_is_its_upper_16_bits():
    for place in PLACES:
        segment = with_copy(make("log", place, scalars_at(1, ADAM), BF16, BF16), BF16)
        segment.correction = torch.zeros(place.numel, dtype=torch.int8)
        segment.grad.copy_(gradient(0, place.numel, seed=4))
        for isa in kernel.isas():
            mine, plain = copied(segment), copied(segment)
            plain.copy = None
            kernel_steps.step([mine], isa=isa)
            kernel_steps.step([plain], isa=isa)
            assert torch.equal(mine.copy, plain.param) and torch.equal(mine.param, plain.param)


@pytest.mark.parametrize(
    ("param_dtype", "dtype"),
    [(torch.float32, BF16), (torch.float32, FP16), (BF16, BF16)],
    ids=str,
)
@pytest.mark.parametrize("codec", CODEC_NAMES, ids=str)
def test_kernel_copy_of_a_block_that_is_left_unchanged_is_made(codec, param_dtype, dtype):
    """The buffer may never have been written; subnormal numbers stay as they are here."""
    for place in PLACES:
        segment = with_copy(make(codec, place, scalars_at(1, ADAM), param_dtype), dtype)
        segment.param[::3] = 2.0**-130
        segment.grad.fill_(torch.nan)
        for isa in kernel.isas():
            mine = copied(segment)
            kernel_steps.step([mine], isa=isa)
            assert torch.equal(mine.param, segment.param)
            assert torch.equal(mine.copy, segment.param.to(dtype)), isa
