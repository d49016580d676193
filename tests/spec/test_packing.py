# SPDX-License-Identifier: Apache-2.0
import base64
import math
import string

import pytest
import torch

from zero8.spec.grid import UNITS, BlockGrid
from zero8.spec.packing import packed, unpacked

# Rows of an even and of an odd length, of several blocks, narrow ones in groups, and short groups.
SHAPES = [(3, 64), (5, 65), (2, 333), (2, 2, 71), (70, 4), (70, 3), (9, 1), (7, 21, 3)]
every_shape = pytest.mark.parametrize("shape", SHAPES)
every_width = pytest.mark.parametrize("bits", UNITS)


def shards(numel):
    """Return many ways to take a run of elements, empty ones among them."""
    places = {*range(6), 63, 64, 65, 66, 127, numel // 2, numel // 2 + 1, numel - 1, numel}
    return [(a, b) for a in places for b in places if a <= b <= numel]


@every_shape
@every_width
def test_packed_codes_of_any_shard_are_unpacked(shape, bits):
    grid, numel = BlockGrid.of(shape, 64), math.prod(shape)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(2**bits, (numel,), generator=generator).to(torch.uint8)
    whole, num_bytes = packed(codes, grid, 0, bits), UNITS[bits].num_bytes
    joined = torch.zeros_like(whole)
    for begin, end in shards(numel):
        mine = packed(codes[begin:end], grid, begin, bits)
        assert mine.numel() == grid.num_bytes(begin, end - begin, bits)
        assert torch.equal(unpacked(mine, grid, begin, end - begin, bits), codes[begin:end])
        at = grid.unit_of(begin, bits) * num_bytes if begin < end else 0
        joined[at : at + mine.numel()] |= mine
    assert torch.equal(joined, whole)


@every_shape
@every_width
def test_blocks_and_rows_begin_with_a_unit(shape, bits):
    grid, numel = BlockGrid.of(shape, 64), math.prod(shape)
    places = [(grid.block_of(n), grid.unit_of(n, bits)) for n in range(numel)]
    for (block, unit), (next_block, next_unit) in zip(places[:-1], places[1:], strict=True):
        assert next_unit - unit in ((1,) if next_block != block else (0, 1))
    length = grid.own_row_length or grid.row_length
    assert places[-1][1] + 1 == numel // length * grid.units_per_row(bits)
    of_codes = grid.code_shape(shape, bits)
    assert math.prod(of_codes) == grid.num_bytes(0, numel, bits)


def test_codes_of_4_bits_lie_two_in_a_byte_the_even_column_in_the_upper_half():
    grid = BlockGrid.of((2, 65), 64)
    codes = torch.arange(1, 131, dtype=torch.uint8) % 15 + 1
    stored = packed(codes, grid, 0, 4)
    assert stored[0] == 16 * codes[0] + codes[1]
    assert stored[32] == 16 * codes[64]  # the last one of its row
    assert packed(codes[1:3], grid, 1, 4).tolist() == [codes[1], 16 * codes[2]]


def test_codes_of_6_bits_lie_four_in_three_bytes_as_in_base64():
    alphabet = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    grid = BlockGrid.of((2, 66), 64)
    codes = torch.arange(132, dtype=torch.uint8) % 64
    stored = packed(codes, grid, 0, 6)
    assert stored[:48].numpy().tobytes() == base64.b64decode(alphabet)
    assert stored[48:51].tolist() == [0, 1 << 4, 0]  # elements 64 and 65: codes 0 and 1
