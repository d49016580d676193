# SPDX-License-Identifier: Apache-2.0
"""Tables with which the kernels decode maps of entries and find the nearest entry.

They search the 16 entries of first moments in `linear4` by halves, and compute the place of the
entry in a map of `dynamic`, as follows.

Away from 0 a map has seven decades of equal cells, an entry in the middle of each.  So the number
of entries between 0 and x is a linear function of |x| in each decade; the pieces join one cell
beyond a decade's end.  The kernels guess the piece by the bit pattern of x, which grows almost like
its logarithm, and take the next one above its joint.  They compare with the exact threshold only
where the estimate is within 2^-12 of an integer, so it must be one at every threshold: the first
entry of the signed map and the last entry, 1.0, have pieces of their own.
"""

from functools import lru_cache

import numpy as np

from zero8.op.structs import CODEC_MAPS
from zero8.spec.codec import CODECS
from zero8.spec.dynamic import DECADES, dynamic_code, lines_of
from zero8.spec.levels import NearestEntry
from zero8.spec.linear4 import linear4_code

_EXPONENT_OF_1 = 127
_FRACTION = 2.0**16
# At a joint the lower piece must be taken, whose estimate is an integer there; at the last joint
# the upper one.  Thresholds of negative entries differ from those of positive ones by less.
_MARGIN = 2.0**-21
_NOWHERE = 0x7F800000  # a joint above all numbers

PIECE_FACTOR, PIECE_SHIFT = 10304, 22
"""The step of the guess in integer arithmetic: 3.18 octaves, a little less than a decade."""
# Number of the first decade's piece, and the smallest pattern that is guessed to lie in it.
_FIRST_PIECE = 33
_SMALLEST = 13433 << 16

WITH_MAPS = [CODECS[name].number for name in ("dynamic", "linear4")]
"""The numbers of the codecs whose kernels take maps."""


@lru_cache(maxsize=1)
def codec_maps() -> np.ndarray:
    """Return the tables of all maps: one record of `CODEC_MAPS`."""
    maps = np.zeros(1, CODEC_MAPS)
    _fill_dynamic(maps["of_signed"], dynamic_code(signed=True))
    _fill_dynamic(maps["of_unsigned"], dynamic_code(signed=False))
    _fill_linear4(maps["of_linear4"], linear4_code(signed=True))
    return maps


def _fill_dynamic(record: np.ndarray, code: NearestEntry) -> None:
    cells, gap, origin = lines_of(signed=code.signed)
    at = (_EXPONENT_OF_1 + np.log2([*cells, 2 * cells[-1]]).astype(int)) % 8
    record["gap"][..., at] = [*gap, 0.0]
    record["origin"][..., at] = [*origin, 1.0]
    record["thresholds"] = np.append(code.thresholds.numpy(), np.float32(np.inf))
    _fill_pieces(record, code)


def _fill_linear4(record: np.ndarray, code: NearestEntry) -> None:
    record["levels"] = code.levels.numpy()
    for row in range(4):
        part = 16 >> row  # entries, of which the threshold is between the two in the middle
        record["thresholds"][..., row, : 1 << row] = code.thresholds.numpy()[part // 2 - 1 :: part]


def _fill_pieces(record: np.ndarray, code: NearestEntry) -> None:
    # The smallest x > 0 that is nearest to the i-th entry above 0, from i = 1.
    joins = np.append(np.nan, code.thresholds.numpy()[code.zero_code :].astype(np.float64))
    counts = np.array([2 ** (decade + (not code.signed)) for decade in range(DECADES)])
    first = np.cumsum([1, *counts])  # number of each decade's first entry, and of the entry 1.0
    top = first[-1]
    slopes = [*counts / (0.9 * 10.0 ** np.arange(1 - DECADES, 1)), 0.5 / (1 - joins[top])]
    offsets = [*first[:-1] - counts / 9, top - joins[top] * slopes[-1]]
    if code.signed:
        slopes[0] = 1 / (joins[2] - joins[1])
        offsets[0] = 1 - joins[1] * slopes[0]
    margins = np.append(np.full(DECADES - 1, 1 + _MARGIN), 1 - _MARGIN)
    joints = _pattern(joins[first[1:]] * margins) - 1
    pieces = _FIRST_PIECE + np.arange(DECADES + 1)
    # In each piece the guess is that piece or the one before.
    assert np.array_equal(_guess(joints), pieces[:-1])
    ends = _guess(np.array([_SMALLEST - 1, _SMALLEST]))
    assert ends.tolist() == [_FIRST_PIECE - 1, _FIRST_PIECE]
    record["joint"][..., pieces % 8] = [*joints, _NOWHERE]
    record["slope"][..., pieces % 8] = np.array(slopes) * _FRACTION
    record["offset"][..., pieces % 8] = np.array(offsets) * _FRACTION
    record["last"][..., pieces % 8] = [*first[1:] - 1, top]
    record["smallest"] = _SMALLEST


def _pattern(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def _guess(pattern: np.ndarray) -> np.ndarray:
    return (pattern >> 16) * PIECE_FACTOR >> PIECE_SHIFT
