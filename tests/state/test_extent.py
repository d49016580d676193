# SPDX-License-Identifier: Apache-2.0
"""Boxes of parameters against a mirror that indexes all elements one by one."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from zero8.spec.grid import BlockGrid
from zero8.state.extent import Extent, local
from zero8.state.table import Piece

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SHAPES = (
    *((), (0,), (1,), (5,), (3, 4), (1, 4), (4, 1), (0, 3), (3, 0)),
    *((2, 3, 4), (3, 1, 4), (1, 1, 3), (2, 0, 3), (2, 3, 2, 3), (1, 2, 1, 3), (2, 2, 3, 1)),
)


def ranges_of(size, step=1):
    """Return (offset, number) of all ranges of a dimension with edges at multiples of `step`."""
    edges = sorted({*range(0, size, step), size})
    return [(begin, end - begin) for begin in edges for end in edges if begin <= end]


def held_of(size, step):
    """Return the ranges that ranks may have, of which empty ones are at 0."""
    return [(0, 0), *((begin, number) for begin, number in ranges_of(size, step) if number)]


def extents_of(shape, ranges):
    """Return an extent for each way to choose a range in every dimension."""
    for box in itertools.product(*ranges):
        offset, sizes = zip(*box, strict=True) if box else ((), ())
        yield Extent(shape, sizes, offset)


def inside(numbers, box):
    """Return the numbers, which fill a shape in order, that are in a box; in order."""
    sizes, offset = box
    slices = tuple(slice(at, at + size) for at, size in zip(offset, sizes, strict=True))
    return numbers[slices].flatten().tolist()


def numbered(shape):
    return torch.arange(math.prod(shape)).view(shape)


def whole_piece(shape, block_size=0):
    return Piece(0, math.prod(shape), 0, shape, 7, block_size, "p")


# --- The elements ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_table_of_every_box_lists_its_elements_in_order_in_the_fewest_runs(shape):
    parameter, index = whole_piece(shape), numbered(shape)
    for extent in extents_of(shape, map(ranges_of, shape)):
        elements = inside(index, extent.box)
        table = extent.table(parameter)
        listed = [piece.first + i for piece in table.pieces for i in range(piece.numel)]
        assert listed == elements, extent
        assert table.numel == extent.numel == len(elements), extent
        jumps = sum(after != before + 1 for before, after in itertools.pairwise(elements))
        assert len(table.pieces) == jumps + 1, extent
        for piece in table.pieces:
            assert replace(piece, start=0, numel=parameter.numel, first=0) == parameter


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_table_of_a_whole_parameter_is_the_parameter_as_one_piece(shape):
    extent = Extent.whole(shape)
    assert extent.table(whole_piece(shape)).pieces == (whole_piece(shape),)
    assert extent.box == (shape, (0,) * len(shape))


# --- The scales -----------------------------------------------------------------------------------

# Shape, block size, and in each dimension the step between the edges of the boxes: those that a
# sharding may have.  Rows of several blocks, the last one short; experts; rows of two dimensions,
# cut between blocks; groups of narrow rows, cut between groups.
ALIGNED = [
    ((5, 600), 256, (1, 256)),
    ((5, 512), 64, (2, 128)),
    ((3, 4, 300), 64, (1, 1, 64)),
    ((4, 6, 32), 64, (1, 2, 32)),
    ((3, 8, 4, 8), 128, (1, 4, 4, 8)),
    ((2, 3, 2, 130), 64, (1, 1, 1, 64)),
    ((10, 12), 64, (5, 12)),
    ((23, 1), 64, (64, 1)),
    ((60, 3, 4), 256, (21, 3, 4)),
]
# The same, with edges inside of blocks; the second of rows of two dimensions.
CUTTING = [
    ((3, 600), 256, (1, 100)),
    ((3, 16, 9), 64, (1, 1, 9)),
    ((2, 3, 130), 64, (1, 1, 13)),
    ((23, 12), 64, (1, 12)),
    ((40, 1), 64, (3, 1)),
    ((11, 63), 256, (1, 63)),
]


def extents_at(shape, block_size, steps):
    """Return all extents with edges at these steps; dimensions inside of a row are whole."""
    row = len(BlockGrid.of(shape, block_size).scale_shape(shape)) - 1
    ranges = [held_of(size, step) for size, step in zip(shape, steps, strict=True)]
    ranges[row + 1 :] = [[(0, size)] for size in shape[row + 1 :]]
    if len(shape) > 1 and math.prod(shape[1:]) < 64:
        ranges[1:] = [[(0, size)] for size in shape[1:]]
    return extents_of(shape, ranges)


@pytest.mark.parametrize(("shape", "block_size", "steps"), [*ALIGNED, *CUTTING])
def test_scale_box_holds_the_scales_of_the_elements_and_no_others(shape, block_size, steps):
    parameter, index = whole_piece(shape, block_size), numbered(shape)
    numbers = numbered(parameter.grid.scale_shape(shape))
    assert numbers.numel() == parameter.grid.num_blocks
    for extent in extents_at(shape, block_size, steps):
        touched = {parameter.grid.block_of(element) for element in inside(index, extent.box)}
        assert inside(numbers, extent.scale_box(parameter)) == sorted(touched), extent


@pytest.mark.parametrize(("shape", "block_size", "steps"), ALIGNED)
def test_scale_box_has_the_order_in_which_the_pieces_have_their_scales(shape, block_size, steps):
    """A store keeps the scales of one piece after those of another; the entry is a view of them."""
    parameter = whole_piece(shape, block_size)
    numbers = numbered(parameter.grid.scale_shape(shape))
    for extent in extents_at(shape, block_size, steps):
        of_pieces = [
            parameter.grid.block_of(piece.first) + i
            for piece in extent.table(parameter).pieces
            for i in range(piece.num_blocks)
        ]
        assert inside(numbers, extent.scale_box(parameter)) == of_pieces, extent


# --- The entries ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "per_element"), [((), ()), ((5,), ()), ((0, 3), ()), ((3, 4), (2,)), ((2, 3, 4), ())]
)
def test_entry_of_a_whole_parameter_is_a_view_that_part_of_returns(shape, per_element):
    """The box has fewer dimensions than the tensor where each element has several numbers."""
    extent, entire = Extent.whole(shape), (*shape, *per_element)
    flat = torch.arange(math.prod(entire), dtype=torch.float32)
    entry = extent.entry(flat.view(-1, *per_element), entire, extent.box)
    assert torch.equal(entry, flat.view(entire)) and entry.shape == entire
    assert entry.data_ptr() == flat.data_ptr()
    assert extent.part_of("x", entry, entire, extent.box) is entry


@pytest.mark.parametrize("value", [3, 0.5, None, torch.ones(2), torch.nn.Parameter(torch.ones(2))])
def test_local_of_what_is_whole_is_itself(value):
    assert local(value) is value
