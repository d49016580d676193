# SPDX-License-Identifier: Apache-2.0
"""Tables with which the kernels decode the dynamic maps and find the nearest entry.

Away from 0 a map has seven decades of equal cells, an entry in the middle of each.  So the number
of entries between 0 and x is a linear function of |x| in each decade, and between a decade's last
entry and the next one's first the threshold lies one cell beyond the decade's end.  With the ranges
below the first entry and above the last but one that makes nine pieces, of which an octave of |x|
touches two at most.

The kernels estimate the number of entries by its piece, and compare with the exact threshold only
where the estimate is within 2^-12 of an integer.  For that the estimate has to be an integer at
every threshold, which decides the slopes of the outer pieces.
"""

from functools import lru_cache

import numpy as np

from zero8.op.structs import DYNAMIC_MAPS
from zero8.spec.codec import CODECS
from zero8.spec.dynamic import DynamicCode

_DECADES = 7
_FRACTION = 2.0**16
# At a joint the lower piece must be taken, whose estimate is an integer there; at the last joint
# the upper one.  Thresholds of negative entries differ from those of positive ones by less.
_MARGIN = 2.0**-21


@lru_cache(maxsize=1)
def dynamic_maps() -> np.ndarray:
    """Return the tables of both maps: one record of `DYNAMIC_MAPS`."""
    maps = np.zeros(1, DYNAMIC_MAPS)
    for name in ("exp_avg", "exp_avg_sq"):
        code = getattr(CODECS["dynamic"], name)
        record = maps[name]
        levels = code.levels.numpy()
        record["levels"] = levels
        record["thresholds"] = np.append(code.thresholds.numpy(), np.float32(np.inf))
        record["level_bytes"] = levels.astype("<f4").view(np.uint8).reshape(256, 4).T
        _fill_pieces(record, code)
    return maps


def _fill_pieces(record: np.ndarray, code: DynamicCode) -> None:
    # The smallest x > 0 that is nearest to the i-th entry above 0, from i = 1.
    joins = np.append(np.nan, code.thresholds.numpy()[code.zero_code :].astype(np.float64))
    cells = [2 ** (decade + (not code.signed)) for decade in range(_DECADES)]
    first = np.cumsum([1, *cells])  # number of each decade's first entry, and of the entry 1.0
    top = first[-1]
    slopes, offsets, last = [0.5 / joins[1]], [0.5], [0]
    for decade, count in enumerate(cells):
        slopes.append(count / (0.9 * 10.0 ** (decade - _DECADES + 1)))
        offsets.append(first[decade] - count / 9)
        last.append(first[decade] + count - 1)
    slopes.append(0.5 / (1 - joins[top]))
    offsets.append(top - joins[top] * slopes[-1])
    last.append(top)
    for name, values in (("slope", slopes), ("offset", offsets)):
        record[name][..., : len(values)] = np.array(values) * _FRACTION
    record["last"][..., : len(last)] = last
    joints = joins[first] * np.append(np.full(_DECADES, 1 + _MARGIN), 1 - _MARGIN)
    for octave in range(32):
        begin, end = 2.0 ** (octave - 31), 2.0 ** (octave - 30)
        inside = joints[(joints > begin) & (joints < end)]
        assert len(inside) <= 1, (octave, inside)
        joint = np.float32(inside[0] if len(inside) else 2.0)
        record["octave_piece"][..., octave] = np.count_nonzero(joints <= begin)
        record["octave_joint"][..., octave] = joint.view(np.uint32) - 1
