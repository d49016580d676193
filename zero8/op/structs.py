# SPDX-License-Identifier: Apache-2.0
"""The structs of csrc/format.h, field by field, for numpy: the records that kernels take.

The build of the op compares them with the structs: `zero8.op.shared_numbers`.
"""

from functools import cache

import numpy as np
import torch

from zero8.spec.algorithm import Algorithm
from zero8.spec.algorithms import ALGORITHMS

MAX_MOMENTS = 3
"""The most moments that an algorithm has; records have a place for each."""
MOMENT = np.dtype(
    [("values", "u8"), ("scales", "u8"), ("num_scales", "i8"), ("codec", "i4"), ("phase", "u4")]
)
WEIGHT_SUMS = np.dtype([("all", "u4"), ("without_zeros", "u4")])
SEGMENT = np.dtype(
    [
        ("param", "u8"),
        ("grad", "u8"),
        ("correction", "u8"),
        ("weight_sums", "u8"),
        ("copy", "u8"),
        ("row_scales", "u8"),
        ("moments", MOMENT, MAX_MOMENTS),
        ("numel", "i8"),
        ("first", "i8"),
        ("row_length", "i8"),
        ("own_row_length", "i8"),
        ("nonfinite_blocks", "i8"),
        ("block_size", "i4"),
        ("algorithm", "i4"),
        ("param_dtype", "i4"),
        ("grad_dtype", "i4"),
        ("rounding", "i4"),
        ("scalars", "i4"),
        ("param_phase", "u4"),
        ("copy_dtype", "i4"),
        ("row_scales_dtype", "i4"),
        ("unused", "i4"),
    ]
)
DYNAMIC_MAP = np.dtype(
    [
        ("levels", "f4", 256),
        ("thresholds", "f4", 256),
        ("joint", "u4", 8),
        ("slope", "f4", 8),
        ("offset", "f4", 8),
        ("last", "u4", 8),
        ("smallest", "u4"),
    ]
)
LINEAR4_MAP = np.dtype([("levels", "f4", 16), ("thresholds", "f4", (4, 8))])
CODEC_MAPS = np.dtype(
    [("of_signed", DYNAMIC_MAP), ("of_unsigned", DYNAMIC_MAP), ("of_linear4", LINEAR4_MAP)]
)
KEPT_PIECE = np.dtype(
    [
        ("param_offset", "u8"),
        ("grad_offset", "u8"),
        ("owner", "i8"),
        ("moment_keys", "u4", MAX_MOMENTS),
        ("param_key", "u4"),
    ]
)
NUMBERS = np.dtype([("data", "u8"), ("numel", "i8"), ("dtype", "i4"), ("unused", "i4")])
TENSOR = np.dtype(
    [("data", "u8"), ("numel", "i8"), ("kind", "i8"), ("contiguous", "i8"), ("contents", "i8")]
)

FLOAT32_MOMENTS = 0
"""The codec number of float32 moments in a `SEGMENT`."""
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
WITHOUT_MEMORY = -1
"""The kind of a `TENSOR` that has no memory of its own."""
MAX_HASHED = 128
"""The most elements of an int64 tensor whose contents are hashed."""

MOST_SCALARS = max(len(one.scalars_type._fields) for one in ALGORITHMS)


@cache
def scalars_dtype(algorithm: Algorithm) -> np.dtype:
    """Return the struct of an algorithm's scalars, padded to the longest of all algorithms."""
    names = algorithm.scalars_type._fields
    return np.dtype(
        {
            "names": list(names),
            "formats": ["f4"] * len(names),
            "offsets": [4 * place for place in range(len(names))],
            "itemsize": 4 * MOST_SCALARS,
        }
    )
