# SPDX-License-Identifier: Apache-2.0
"""The codes of `fp8`, element by element; test_codec_blocks.py has whole blocks."""

from fractions import Fraction

import pytest
import torch

from zero8.spec import arithmetic as ieee
from zero8.spec.codec import CODECS

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SIGNED, UNSIGNED = CODECS["fp8"].of_signed, CODECS["fp8"].of_unsigned
CODES = {"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED}
POSITIVE = torch.arange(127, dtype=torch.uint8)  # all but NaN
both = pytest.mark.parametrize("which", CODES)


def valid(which: str) -> torch.Tensor:
    """Return what quantize makes: neither NaN nor -0, and for v nothing negative."""
    negative = POSITIVE[1:] | 128
    return torch.cat([POSITIVE, negative]) if which == "exp_avg" else POSITIVE


def test_fp8_levels_are_those_of_the_format_and_of_torch():
    """(1 + f/8) 2^(e-7) for exponent e and fraction f, f/8 2^-6 for e = 0; from 128 on negative."""
    levels = SIGNED.levels
    for code, level in enumerate(levels.tolist()):
        exponent, fraction = code >> 3 & 15, code & 7
        significand = Fraction(fraction + (8 if exponent else 0), 8)
        magnitude = significand * Fraction(2) ** (max(exponent, 1) - 7)
        assert Fraction(level) == (-magnitude if code > 127 else magnitude)
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert theirs.isnan().nonzero().flatten().tolist() == [127, 255]
    assert torch.equal(levels[theirs.isfinite()], theirs[theirs.isfinite()])
    assert levels[SIGNED.largest] == SIGNED.TOP == 448


@both
@pytest.mark.parametrize("scale", [1.0, 3.7e-20, 0.1, 2.0**117, 2.0**-117], ids=repr)
def test_encode_fp8_all_codes_return_what_was_decoded(which, scale):
    code, codes = CODES[which], valid(which)
    (scale,) = code.scales(torch.tensor([448 * scale]), torch.tensor([0]), 1).tolist()
    scales = torch.full((len(codes),), scale)
    x = code.decode(codes, scales, 1.0)
    assert torch.equal(x.double(), code.levels[codes.long()].double() * scale), "exact"
    assert torch.equal(code.encode(x, scales, None), codes)


@both
def test_encode_fp8_at_every_boundary_is_the_nearest_or_even_code(which):
    """Two floats on either side of every level and of the middle of any two, which is exact.

    With scale 1 the normalized value is x itself.
    """
    code, levels = CODES[which], SIGNED.levels[:127].double()
    middle = (levels[:-1] + levels[1:]) / 2
    assert torch.equal(middle.float().double(), middle)
    x = torch.cat([middle, levels]).float()
    for _ in range(2):
        x = torch.cat([x, x.nextafter(torch.tensor(500.0)), x.nextafter(torch.tensor(0.0))])
    x = ieee.flush(torch.cat([x, torch.tensor([1e-30, 448.01, 1e9])])).unique()
    distance = (x.double()[:, None] - levels).abs()
    least = distance.min(1, keepdim=True).values
    is_even = torch.arange(127) % 2 == 0
    nearest = (distance == least).to(torch.int64) * (1 + is_even)
    expected = nearest.argmax(1)
    assert ((distance == least).sum(1) == 2).sum() == 126, "every tie is here"
    scales = torch.ones_like(x)
    if which == "exp_avg_sq":
        expected = torch.where(x > 0, expected.clamp(min=1), 0)
    assert torch.equal(code.encode(x, scales, None).long(), expected)
    if which == "exp_avg":
        negative = torch.where(expected > 0, expected + 128, 0)
        assert torch.equal(code.encode(-x, scales, None).long(), negative)


@both
@pytest.mark.parametrize("gain", [0.9, 0.999], ids=repr)
def test_decode_fp8_gain_multiplies_the_scale_first(which, gain):
    """Two roundings, (C1): of scale * gain, and of the product with the level."""
    code, codes = CODES[which], valid(which)
    scales = torch.full((len(codes),), 0.37)
    wanted = ieee.mul(code.levels[codes.long()], ieee.mul(0.37, gain))
    assert torch.equal(code.decode(codes, scales, gain), wanted)


def test_fp8_scale_of_every_mantissa_is_a_fixpoint():
    """A block's extreme decodes to 448 * scale, exactly, which has to give the same scale, (C11).

    Exhaustive over the 2^23 mantissas of one octave; other octaves differ by an exact factor.
    """
    for start in range(0, 2**23, 2**20):
        bits = torch.arange(0x3F800000 + start, 0x3F800000 + start + 2**20, dtype=torch.int32)
        absmax = bits.view(torch.float32)
        scale = SIGNED.scales(absmax, torch.arange(2**20), 2**20)
        assert torch.equal((448 * scale).double(), 448 * scale.double()), "exact"
        assert torch.equal(SIGNED.scales(448 * scale, torch.arange(2**20), 2**20), scale)
        assert ((448 * scale.double() / absmax.double() - 1).abs() <= 2.0**-20 + 2.0**-24).all()
        codes = SIGNED.encode(absmax[::64], scale[::64], None)
        assert (codes == SIGNED.largest).all()


def test_fp8_smallest_scale_keeps_the_first_level_normal():
    """So no normal float that is the largest of its block rounds to 0."""
    assert SIGNED.min_scale * float(SIGNED.levels[1]) == 2.0**-126
    absmax = torch.tensor([0.0, 2.0**-126, 447 * SIGNED.min_scale, 448 * SIGNED.min_scale])
    scales = SIGNED.scales(absmax, torch.arange(4), 4)
    assert scales.tolist() == [0.0] + [SIGNED.min_scale] * 3
