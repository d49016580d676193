# SPDX-License-Identifier: Apache-2.0
"""The structs of csrc/format.h, field by field, for numpy: the records that kernels take.

A test compares them with the structs: tests/kernel/test_structs.py.
"""

import numpy as np
import torch

from zero8.spec.algorithms import ALGORITHMS

MAX_MOMENTS = 3
"""The most moments that an algorithm has; records have a place for each."""


def _of(format: str, names: str) -> list[tuple[str, str]]:
    return [(name, format) for name in names.split()]


MOMENT = np.dtype(
    [*_of("u8", "values scales"), ("num_scales", "i8"), ("codec", "i4"), ("phase", "u4")]
)
SEGMENT = np.dtype(
    [
        *_of("u8", "param grad correction weight_sums copy row_scales"),
        ("moments", MOMENT, MAX_MOMENTS),
        *_of("i8", "numel first row_length own_row_length nonfinite_blocks"),
        *_of("i4", "block_size algorithm param_dtype grad_dtype rounding scalars"),
        ("param_phase", "u4"),
        *_of("i4", "copy_dtype row_scales_dtype unused"),
    ]
)
DYNAMIC_MAP = np.dtype(
    [
        *_of("8f4", "gap origin"),
        ("thresholds", "f4", 256),
        ("joint", "u4", 8),
        *_of("8f4", "slope offset"),
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
        *_of("u8", "param_offset grad_offset"),
        ("owner", "i8"),
        ("moment_keys", "u4", MAX_MOMENTS),
        ("param_key", "u4"),
    ]
)
NUMBERS = np.dtype([("data", "u8"), ("numel", "i8"), ("dtype", "i4"), ("unused", "i4")])
TENSOR = np.dtype([("data", "u8"), *_of("i8", "numel kind contiguous contents")])

FLOAT32_MOMENTS = 0
"""The codec number of float32 moments in a `SEGMENT`."""
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
WITHOUT_MEMORY = -1
"""The kind of a `TENSOR` that has no memory of its own."""
MAX_HASHED = 128
"""The most elements of an int64 tensor whose contents are hashed."""

MOST_SCALARS = max(len(one.scalars_type._fields) for one in ALGORITHMS)
SCALARS = np.dtype([("numbers", "f4", MOST_SCALARS)])
"""The scalars of any algorithm, in its order, and zeros."""
