# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero8.spec.grid import BlockGrid

# Global shape -> (rows, row length, shape of the scales) with blocks of 256.
GRIDS = {
    "linear": ((33, 200), (33, 200, (33, 1))),
    "linear with a ragged second block": ((33, 300), (33, 300, (33, 2))),
    "experts": ((5, 12, 300), (60, 300, (5, 12, 2))),
    "experts with narrow rows": ((8, 16, 4), (8, 64, (8, 1))),
    "conv": ((10, 16, 3, 3), (10, 144, (10, 1))),
    "row of exactly 64": ((7, 64), (7, 64, (7, 1))),
    "one row": ((1, 5000), (1, 5000, (1, 20))),
    "leading ones": ((1, 1, 200), (1, 200, (1, 1, 1))),
    "one in the middle": ((4, 1, 200), (4, 200, (4, 1, 1))),
    "one at the end": ((4, 200, 1), (4, 200, (4, 1))),
    "no rows": ((0, 100), (0, 100, (0, 1))),
    "no rows in the middle": ((3, 0, 100), (0, 100, (3, 0, 1))),
}
# The same where rows are narrow: groups, their length, and the shape of the scales.
GROUPS = {
    "narrow side of LoRA": ((4096, 8), (128, 32 * 8, (128, 1))),
    "depthwise conv": ((40, 1, 3, 3), (2, 28 * 9, (2, 1))),
    "rows of 63": ((4096, 63), (1024, 4 * 63, (1024, 1))),
    "one element per row": ((1000, 1), (4, 256, (4, 1))),
    "narrow in many dimensions": ((100, 2, 3, 1, 5), (13, 8 * 30, (13, 1))),
    "fewer rows than a group": ((3, 5), (1, 51 * 5, (1, 1))),
    "one narrow row": ((1, 63), (1, 4 * 63, (1, 1))),
    "no narrow rows": ((0, 3), (0, 85 * 3, (0, 1))),
}
NO_GRID = {
    "scalar": (),
    "vector": (100_000,),
    "empty rows": (5, 0),
    "empty rows in the middle": (5, 3, 0),
}


def own_row_length(shape):
    """Return the length of a parameter's rows if they are narrow, else 0."""
    return math.prod(shape[1:]) if shape in [one for one, _ in GROUPS.values()] else 0


@pytest.mark.parametrize(
    ("shape", "expected"), [*GRIDS.values(), *GROUPS.values()], ids=[*GRIDS, *GROUPS]
)
def test_grid_of_shape_keeps_most_leading_dimensions_or_groups_rows(shape, expected):
    num_rows, row_length, scale_shape = expected
    grid = BlockGrid.of(shape, 256)
    assert grid == BlockGrid(num_rows, row_length, 256, own_row_length(shape))
    assert grid.scale_shape(shape) == scale_shape
    assert math.prod(grid.scale_shape(shape)) == grid.num_blocks


@pytest.mark.parametrize("shape", NO_GRID.values(), ids=NO_GRID)
def test_grid_of_shape_without_rows_of_any_length_is_none(shape):
    assert BlockGrid.of(shape, 256) is None


@given(st.data())
def test_grid_blocks_of_a_range_match_a_loop_over_elements(data):
    num_rows = data.draw(st.integers(1, 4))
    row_length = data.draw(st.integers(64, 700))
    block_size = data.draw(st.sampled_from([64, 128, 256]))
    block_of, blocks = [], -1
    for _ in range(num_rows):
        for column in range(row_length):
            blocks += column % block_size == 0
            block_of.append(blocks)
    first = data.draw(st.integers(0, len(block_of) - 1))
    numel = data.draw(st.integers(0, len(block_of) - first))

    grid = BlockGrid(num_rows, row_length, block_size)
    assert grid.num_blocks == blocks + 1
    assert [grid.block_of(e) for e in range(first, first + numel)] == block_of[first:][:numel]
    touched = len(set(block_of[first : first + numel]))
    assert grid.num_blocks_touched(first, numel) == touched
    numbers, count = grid.block_numbers(first, numel)
    assert count == touched and numbers.dtype == torch.int64
    assert numbers.tolist() == [b - block_of[first] for b in block_of[first : first + numel]]


@given(st.data())
def test_grid_blocks_of_narrow_rows_match_a_loop_over_rows(data):
    """A new block where the next row would not fit: no block is too long, and none cuts a row."""
    num_rows = data.draw(st.integers(1, 400))
    row = data.draw(st.integers(1, 63))
    block_size = data.draw(st.sampled_from([64, 128, 256, 4096]))
    block_of, blocks, length = [], -1, block_size
    for _ in range(num_rows):
        if length + row > block_size:
            blocks, length = blocks + 1, 0
        block_of += [blocks] * row
        length += row
    first = data.draw(st.integers(0, len(block_of) - 1))
    numel = data.draw(st.integers(1, len(block_of) - first))

    grid = BlockGrid.of((num_rows, row), block_size)
    assert (grid.num_blocks, grid.blocks_per_row) == (blocks + 1, 1)
    expected = block_of[first : first + numel]
    assert [grid.block_of(first), grid.block_of(first + numel - 1)] == [expected[0], expected[-1]]
    numbers, count = grid.block_numbers(first, numel)
    assert numbers.tolist() == [block - expected[0] for block in expected]
    assert count == grid.num_blocks_touched(first, numel) == expected[-1] - expected[0] + 1
