# SPDX-License-Identifier: Apache-2.0
"""Groups of narrow rows that become scales of rows and groups again, cut by boundaries or not."""

import math
from itertools import pairwise

import pytest
import torch
from moment_samples import MOMENTS, spread_values
from test_extent import whole_piece

from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, dequantize, quantize
from zero8.spec.grid import BlockGrid
from zero8.spec.packing import packed
from zero8.state import narrow
from zero8.state.extent import Extent
from zero8.state.store import MomentStore

pytestmark = pytest.mark.usefixtures("one_torch_thread")
every_code = pytest.mark.parametrize(
    ("codec", "which"), [(name, which) for name in CODECS for which in MOMENTS]
)
SMALLEST_NORMAL = 2.0**-126

# Shape, block size, and the rows of the part: whole parameters, most of whose last groups are
# short, a group that is no full one, groups of one row; parts that begin, end or both inside of a
# group, within one group, and of no rows.
PARTS = [
    ((300, 1), 64, 0, 300),
    ((300, 1), 256, 100, 257),
    ((53, 12), 64, 0, 53),
    ((53, 12), 64, 3, 53),
    ((53, 12), 64, 10, 24),
    ((60, 3, 2, 2), 256, 0, 60),
    ((43, 16), 64, 0, 43),
    ((43, 16), 64, 4, 39),
    ((43, 16), 256, 17, 18),
    ((43, 16), 64, 8, 8),
    ((11, 63), 256, 2, 11),
    ((11, 63), 64, 3, 9),
    ((3, 5), 256, 0, 3),
]
every_part = pytest.mark.parametrize(("shape", "block_size", "begin", "end"), PARTS)

# Shape, block size, and where parts begin and end: cut groups first, last and short, and between;
# two that are cut at once, one that is cut twice, and by the edge of all of these parts too.
CUTS = [
    ((300, 1), 64, (0, 100, 300)),
    ((300, 1), 256, (0, 255, 300)),
    ((53, 12), 64, (0, 51, 53)),
    ((53, 12), 64, (3, 4, 48)),
    ((53, 12), 64, (0, 6, 8, 21, 53)),
    ((60, 3, 2, 2), 256, (0, 20, 40, 60)),
    ((43, 16), 64, (0, 22, 43)),
    ((43, 16), 256, (5, 11, 30, 40)),
    ((11, 63), 256, (0, 2, 11)),
]
# What the values of all parts but the first are multiplied by: further scales, others of zeros, of
# what is in part subnormal, and of what is more octaves above than a group can span.
FACTORS = [1.0, 0.0, 2.0**-100, 2.0**60]


def part(shape, begin, end):
    return Extent(shape, (end - begin, *shape[1:]), (begin, *[0] * (len(shape) - 1)))


def groups_of(shape, block_size, begin, end):
    """Return the group of each row, counted from that of the first row; (rows,)."""
    grid, row = BlockGrid.of(shape, block_size), math.prod(shape[1:])
    numbers = [grid.block_of(number * row) for number in range(begin, end)]
    return torch.tensor(numbers, dtype=torch.int64) - min(numbers, default=0)


def values_of(which, shape, begin, end):
    """Return the moments of some rows, of many binades; rows and elements of zeros, subnormals."""
    row = math.prod(shape[1:])
    x = spread_values(which, shape[0] * row, seed=1).view(shape[0], row)
    x[5::7] = 0.0
    x[3::11] = SMALLEST_NORMAL / 16
    x[8::13] *= 2.0**-90
    x[9:10] = SMALLEST_NORMAL
    return x[begin:end].flatten()


def encoded(code, x, group, shape):
    """Return codes of rows, shaped as they, and the scales of their groups."""
    block = group.repeat_interleave(math.prod(shape[1:]))
    codes, scales = quantize(code, x, block, int(group.max()) + 1 if len(group) else 0)
    return codes.view(len(group), *shape[1:]), scales


def encoded_apart(code, which, shape, block_size, edges, factor):
    """Return the codes, and the scales of rows, of parts that have been encoded one by one."""
    codes, scales = [], []
    for begin, end in pairwise(edges):
        x, group = values_of(which, shape, begin, end), groups_of(shape, block_size, begin, end)
        ours, of_group = encoded(code, x * (factor if begin > edges[0] else 1.0), group, shape)
        codes.append(ours)
        scales.append(of_group[group].unsqueeze(1))
    return torch.cat(codes), torch.cat(scales)


def decoded(code, codes, scales):
    """Return what codes stand for, by the scale of each row; (numel,)."""
    row = torch.arange(len(codes)).repeat_interleave(codes[0].numel())
    return dequantize(code, codes.flatten(), scales.squeeze(1), row)


# --- Groups that nobody cuts ----------------------------------------------------------------------


def grouped(code, codes, scales, extent, block_size):
    """Return the codes, a byte each, and the scales of groups of a moment that is loaded."""
    (piece,) = (table := extent.table(whole_piece(extent.shape, block_size))).pieces
    codec, rule = next(
        (codec, ADAM.moment(which))
        for codec in CODECS.values()
        for which in MOMENTS
        if codec.code_of(ADAM.moment(which)) is code
    )
    of_rows, empty = scales.squeeze(1), scales.new_empty(0)
    stored = packed(codes.flatten(), piece.grid, piece.first, code.bits)
    got = narrow.joined(MomentStore(codec, rule, table, stored, of_rows, empty), extent)
    return got.codes_of(0, 0, codes.numel()).view_as(codes), got.scales.unsqueeze(1)


@every_part
@every_code
def test_scales_of_rows_are_those_of_their_groups(codec, which, shape, block_size, begin, end):
    extent, code = part(shape, begin, end), CODECS[codec].code_of(ADAM.moment(which))
    table = extent.table(whole_piece(shape, block_size))
    store = MomentStore.zeros(CODECS[codec], ADAM.moment(which), table)
    store.write(0, values_of(which, shape, begin, end))
    codes, scales = encoded_apart(code, which, shape, block_size, (begin, end), 1.0)
    assert torch.equal(store.codes_of(0, 0, codes.numel()), codes.flatten())
    got = narrow.scales_of_rows(store, extent)
    assert got.shape == (end - begin, 1, *code.scale_shape)
    assert torch.equal(got, scales)


@every_part
@every_code
def test_grouped_returns_uncut_groups_verbatim(codec, which, shape, block_size, begin, end):
    """Also of a part that holds some rows only of its first and of its last group."""
    code, group = (
        CODECS[codec].code_of(ADAM.moment(which)),
        groups_of(shape, block_size, begin, end),
    )
    codes, of_group = encoded(code, values_of(which, shape, begin, end), group, shape)
    scales, extent = of_group[group].unsqueeze(1), part(shape, begin, end)
    got_codes, got_scales = grouped(code, codes, scales, extent, block_size)
    assert torch.equal(got_codes, codes)
    assert torch.equal(got_scales, of_group.unsqueeze(1))


# --- Groups that a boundary has cut ---------------------------------------------------------------

every_cut = pytest.mark.parametrize(("shape", "block_size", "edges"), CUTS)
every_factor = pytest.mark.parametrize("factor", FACTORS)


def joined_groups(group, edges):
    """Return which groups have rows on both sides of a boundary; (groups,) bool."""
    joined = torch.zeros(int(group.max()) + 1, dtype=torch.bool)
    for boundary in edges[1:-1]:
        before, after = group[boundary - edges[0] - 1], group[boundary - edges[0]]
        joined[after] |= before == after
    assert joined.any()
    return joined


@every_cut
@every_factor
@every_code
def test_grouped_encodes_cut_groups_once_from_what_both_sides_hold_and_keeps_the_others(
    codec, which, factor, shape, block_size, edges
):
    code = CODECS[codec].code_of(ADAM.moment(which))
    group, extent = (
        groups_of(shape, block_size, edges[0], edges[-1]),
        part(shape, edges[0], edges[-1]),
    )
    codes, scales = encoded_apart(code, which, shape, block_size, edges, factor)
    arguments = codes.clone(), scales.clone()
    got_codes, got_scales = grouped(code, codes, scales, extent, block_size)
    assert torch.equal(codes, arguments[0]) and torch.equal(scales, arguments[1])
    kept = ~joined_groups(group, edges)
    assert torch.equal(got_codes[kept[group]], codes[kept[group]])
    assert torch.equal(got_scales[group][kept[group]], scales[kept[group]])
    assert got_scales.shape == (len(kept), 1, *code.scale_shape)

    before = decoded(code, codes, scales)
    wanted_codes, wanted_scales = encoded(code, before, group, shape)
    assert torch.equal(got_codes, wanted_codes)
    assert torch.equal(got_scales, wanted_scales.unsqueeze(1))
    again = grouped(code, got_codes, got_scales[group], extent, block_size)
    assert torch.equal(again[0], got_codes) and torch.equal(again[1], got_scales)


def test_grouped_joins_sides_that_differ_in_one_number_of_their_scales():
    """Second moments of one `high` on both sides, and a `step` for few octaves and one for many."""
    code, shape = CODECS["log"].of_unsigned, (5, 12)
    group, octaves = torch.zeros(5, dtype=torch.int64), torch.arange(12.0)
    sides = [torch.exp2(-octaves / 6).repeat(2), torch.exp2(-2 * octaves).repeat(3)]
    parts = [encoded(code, x, group[: len(x) // 12], shape) for x in sides]
    codes = torch.cat([part_codes for part_codes, _ in parts])
    (few,), (many,) = (of_group for _, of_group in parts)
    assert few[0] == many[0] and few[1] < many[1]
    scales = torch.stack([few, few, many, many, many]).unsqueeze(1)
    before, extent = decoded(code, codes, scales), part(shape, 0, 5)
    got_codes, got_scales = grouped(code, codes, scales, extent, 64)
    wanted_codes, wanted_scales = encoded(code, before, group, shape)
    assert torch.equal(got_codes, wanted_codes)
    assert torch.equal(got_scales, wanted_scales.unsqueeze(1))
