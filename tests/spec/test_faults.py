# SPDX-License-Identifier: Apache-2.0
"""What quantize makes has no faults; what decodes to no number, or v to less than 0, has one."""

import math

import pytest
import torch
from moment_samples import MOMENTS, spread_values

from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, codec_named, dequantize, quantize
from zero8.spec.faults import fault

FLT_MAX = torch.finfo(torch.float32).max
SMALLEST = 2.0**-126
BLOCK = torch.arange(1024) // 256
LOGS = ("log", "log6")


def blocks(begin, end):
    return BLOCK[begin:end]


def values(which):
    """Blocks of ordinary values, of zeros, of the largest and of the smallest normal floats."""
    x = spread_values(which, 1024, seed=3)
    x[256:512] = 0.0
    x[512:520] = FLT_MAX
    x[768:1024] = SMALLEST * torch.linspace(0.5, 3, 256)
    return x


def made(codec, which):
    code = codec_named(codec).code_of(ADAM.moment(which))
    return code, *quantize(code, values(which), BLOCK, 4)


@pytest.mark.parametrize("which", MOMENTS)
@pytest.mark.parametrize("codec", CODECS)
def test_fault_of_what_quantize_makes_is_none(codec, which):
    code, codes, scales = made(codec, which)
    assert fault(code, codes, scales, blocks) == ""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", MOMENTS)
@pytest.mark.parametrize("codec", CODECS)
def test_fault_of_any_scale_that_is_not_finite_is_found(codec, which, value):
    code, codes, scales = made(codec, which)
    for place in range(scales.numel()):
        damaged = scales.clone()
        damaged.view(-1)[place] = value
        assert "not finite" in fault(code, codes, damaged, blocks)


def put(where, place, value):
    """Return what puts a value into codes or scales."""
    return lambda **tensors: tensors[where].__setitem__(place, value)


def negative_scales(codes, scales):
    scales.neg_()


def a_code_below_normal_floats(codes, scales):
    small = codes[768:]
    assert small[small > 0].min() > 1
    small[-1] = 1


M, V = MOMENTS
RANGES = [1.0, 2**20 + 0.5, 2.0**30]
FAULTS = [
    *((codec, V, negative_scales, "negative scale") for codec in CODECS),
    ("fp8", M, negative_scales, "negative scale"),
    *((name, V, put("scales", (0, 1), x), "range of codes") for name in LOGS for x in RANGES),
    *((codec, V, a_code_below_normal_floats, "smallest normal float") for codec in LOGS),
    *((codec, M, put("scales", 0, FLT_MAX), "largest code is not finite") for codec in LOGS),
    ("fp8", M, put("scales", 0, FLT_MAX / 447), "largest code is not finite"),
    ("log", M, put("codes", 1000, 128), "unused: 128"),
    ("log6", M, put("codes", 1000, 32), "unused: 32"),
    *(("fp8", one, put("codes", 1000, nan), "is NaN") for one in MOMENTS for nan in (127, 255)),
    ("fp8", V, put("codes", 1000, 129), "unused: 129"),
]


@pytest.mark.parametrize(("codec", "which", "damage", "message"), FAULTS)
def test_fault_of_what_steps_cannot_take_is_found(codec, which, damage, message):
    code, codes, scales = made(codec, which)
    damage(codes=codes, scales=scales)
    assert message in fault(code, codes, scales, blocks)


@pytest.mark.parametrize("which", MOMENTS)
def test_fault_of_random_bytes_is_found_or_they_decode_to_finite_numbers(which):
    """Whatever passes is safe to step over: scales of random patterns, and random codes."""
    passed = 0
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)
        for codec in CODECS.values():
            code = codec.code_of(ADAM.moment(which))
            codes = torch.randint(
                0, 1 << code.bits, (1024,), generator=generator, dtype=torch.uint8
            )
            shape = (4, *code.scale_shape)
            bits = torch.randint(-(2**31), 2**31, shape, generator=generator)
            scales = bits.to(torch.int32).view(torch.float32)
            if code.scale_shape and codec.name in LOGS:  # else nearly all are refused
                scales[:, 1] = torch.randint(2**20, 2**24, (4,), generator=generator).float()
                scales[:, 0] = scales[:, 0].abs()
            if fault(code, codes, scales, blocks):
                continue
            passed += 1
            x = dequantize(code, codes, scales, BLOCK)
            assert x.isfinite().all(), (codec.name, seed)
            assert code.signed or x.min() >= 0, (codec.name, seed)
    assert passed > 100
