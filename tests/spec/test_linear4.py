# SPDX-License-Identifier: Apache-2.0
"""The codes of `linear4`, element by element; test_codec_blocks.py has whole blocks."""

from fractions import Fraction

import pytest

from zero8.spec.codec import CODECS, has_zero

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SIGNED, UNSIGNED = CODECS["linear4"].of_signed, CODECS["linear4"].of_unsigned


def test_linear4_levels_of_m_are_those_of_the_paper():
    """Three decades of 1, 2 and 4 cells from 1/10 of their ends on, in the middles of these."""
    middles = [
        Fraction(10) ** (decade - 2)
        * (Fraction(1, 10) + Fraction(9, 10) * (cell + Fraction(1, 2)) / cells)
        for decade, cells in enumerate((1, 2, 4))
        for cell in range(cells)
    ]
    exact = [-x for x in reversed(middles)] + [Fraction(0)] + middles + [Fraction(1)]
    entries = SIGNED.entries.tolist()
    assert entries == pytest.approx([float(x) for x in exact], rel=1e-6)
    assert entries[SIGNED.first] == 0 and SIGNED.levels.tolist() == entries[7:] + entries[:7]
    assert SIGNED.zero_code == 0 and has_zero(SIGNED)


def test_linear4_levels_of_v_are_sixteenths_without_zero():
    assert UNSIGNED.levels.tolist() == [k / 16 for k in range(1, 17)]
    assert not has_zero(UNSIGNED)
