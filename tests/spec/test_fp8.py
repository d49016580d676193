# SPDX-License-Identifier: Apache-2.0
"""The codes of `fp8`, element by element; test_codec_blocks.py has whole blocks."""

from fractions import Fraction

import pytest
import torch

from zero8.spec.codec import CODECS

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SIGNED, UNSIGNED = CODECS["fp8"].of_signed, CODECS["fp8"].of_unsigned


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
