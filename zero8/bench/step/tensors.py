# SPDX-License-Identifier: Apache-2.0
"""Shapes of the tensors that a step is timed on: one large matrix, or a list like a model's."""

import math
from bisect import bisect_right

ROW = 4096
NUM_TENSORS = 400
# Elements of the whole list, enough for 400 tensors.
LEAST_NUMEL = 2**16
# The largest tensor of the list has 10 million elements if the total is 2^25.
LARGEST_SHARE = 10_000_000 / 2**25
# Smaller tensors are vectors: biases and norms.
SMALLEST_MATRIX = 4096


def flat_shape(numel: int) -> tuple[int, int]:
    """Return the shape of one matrix of `numel` elements, a multiple of `ROW`."""
    return numel // ROW, ROW


def model_shapes(total: int) -> list[tuple[int, ...]]:
    """Return `NUM_TENSORS` shapes of `total` elements together, the smallest first.

    One embedding of `LARGEST_SHARE` of the total; the sizes of the others are log-spaced from 1 up
    to where they use up the rest.
    """
    second = bisect_right(range(total), total, key=lambda size: sum(_sizes(total, size))) - 1
    return _filled_up([_shape(size) for size in _sizes(total, second)], total)


def _sizes(total: int, second: int) -> list[int]:
    spaced = [round(second ** (rank / (NUM_TENSORS - 2))) for rank in range(NUM_TENSORS - 1)]
    return [*spaced, round(total * LARGEST_SHARE)]


def _shape(size: int) -> tuple[int, ...]:
    if size < SMALLEST_MATRIX:
        return (size,)
    columns = 1 << size.bit_length() // 2  # 64 to 4096: about the square root
    return size // columns, columns


def _filled_up(shapes: list[tuple[int, ...]], total: int) -> list[tuple[int, ...]]:
    """Add rows to all matrices but the largest, and the rest to a vector, to reach the total."""
    missing = total - sum(map(math.prod, shapes))
    filled = list(shapes)
    for number in reversed(range(len(shapes) - 1)):
        unit = shapes[number][-1] if len(shapes[number]) == 2 else 1
        added, missing = divmod(missing, unit)
        filled[number] = (shapes[number][0] + added, *shapes[number][1:])
    return filled
