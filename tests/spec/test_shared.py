# SPDX-License-Identifier: Apache-2.0
"""Tiles of any shard, and v of rank 1 in them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero8.spec.blocks import place_in_block
from zero8.spec.dither import in_blocks
from zero8.spec.grid import BlockGrid
from zero8.spec.shared import LIMIT, MAX_ROW, MIN_ROW, SharedCode
from zero8.spec.tiles import bytes_of_codes, tiles_of

CODE = SharedCode()


@st.composite
def shards(draw):
    """A grid, and a shard of it of any place."""
    shape = (
        draw(st.sampled_from((1, 2, 3, 40, 64, 65, 130))),
        draw(st.sampled_from((64, 65, 100, 256, 257, 700))),
    )
    grid = BlockGrid.of(shape, draw(st.sampled_from((64, 128, 256, 4096))))
    first = draw(st.integers(0, math.prod(shape)))
    return grid, first, draw(st.integers(0, math.prod(shape) - first))


def plain_tiles(grid: BlockGrid, first: int, numel: int) -> list[int]:
    """Return the byte of each element, by the words of `zero8.spec.tiles`, one after another."""
    pieces, members, byte = [], {}, 0
    element = first
    while element < first + numel:
        row, in_row = divmod(element, grid.row_length)
        column, offset = divmod(in_row, grid.block_size)
        whole = min(grid.block_size, grid.row_length - column * grid.block_size)
        count = min(whole - offset, first + numel - element)
        num_bytes = (offset + count - 1) // 64 - offset // 64 + 1
        pieces.append((offset, count, byte, num_bytes))
        key = (row // 64, column) if count == whole else len(pieces)
        members.setdefault(key, []).append((pieces[-1], count == whole))
        element, byte = element + count, byte + num_bytes
    byte_of = {}
    for rows in members.values():
        (offset, count, _, num_bytes), is_whole = rows[0]
        shared = 1 if is_whole else 64
        while is_whole and len(rows) * num_bytes * shared < count:
            shared *= 2
        for (_, _, own, _), _ in rows:
            for column in range(offset, offset + count):
                code = column // shared - offset // shared
                held_by = rows[code // num_bytes][0][2]
                byte_of[own, column] = held_by + code % num_bytes
    return [byte_of[own, offset + k] for offset, count, own, _ in pieces for k in range(count)]


@given(shards())
@settings(max_examples=150, deadline=None)
def test_tiles_of_any_shard_are_those_that_the_definition_describes(shard):
    grid, first, numel = shard
    tiles = tiles_of(grid, first, numel)
    assert tiles.byte.tolist() == plain_tiles(grid, first, numel)
    assert tiles.num_bytes == grid.num_bytes(first, numel, CODE.bits)


@given(shards(), st.data())
@settings(max_examples=100, deadline=None)
def test_bytes_of_codes_of_some_elements_of_a_shard_are_those_in_its_tiles(shard, data):
    grid, first, numel = shard
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    found = bytes_of_codes(grid, (first, numel), first + begin, end - begin)
    assert torch.equal(found, tiles_of(grid, first, numel).byte[begin:end])


@given(shards())
@settings(max_examples=100, deadline=None)
def test_tiles_of_any_shard_give_each_column_of_a_code_a_place_of_its_own(shard):
    grid, first, numel = shard
    block, num_blocks = grid.block_numbers(first, numel)
    tiles = tiles_of(grid, first, numel)
    assert tiles.tile.unique().tolist() == list(range(tiles.num_tiles))
    places = torch.stack([tiles.byte, tiles.column, tiles.row[block]])
    assert places.unique(dim=1).shape == places.shape
    of_block = place_in_block(block, num_blocks)
    assert (tiles.column < tiles.shared[block]).all() and (tiles.column <= of_block + 63).all()
    # A byte is of one tile.
    pairs = torch.stack([tiles.byte, tiles.tile[block]]).unique(dim=1)
    assert pairs[0].unique().numel() == pairs.shape[1]


def test_tiles_of_shards_that_meet_between_bands_are_those_of_the_whole_parameter():
    grid = BlockGrid.of((150, 300), 128)
    whole = tiles_of(grid, 0, 150 * 300)
    found, base = [], 0
    for first, end in ((0, 64), (64, 128), (128, 150)):
        part = tiles_of(grid, first * 300, (end - first) * 300)
        found.append(part.byte + base)
        base += part.num_bytes
    assert torch.equal(torch.cat(found), whole.byte)


def values(numel: int, seed: int) -> torch.Tensor:
    """Return numbers of many magnitudes, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(numel, generator=generator) * (0, 1, 4, 10)[seed % 4]
    x = torch.exp2(wide + (0, -60, 60, -110, 110)[seed % 5])
    x[torch.rand(numel, generator=generator) < (0, 0.5)[seed % 2]] = 0
    return x


@given(shards(), st.integers(0, 59), st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_shared_encoding_of_decoded_values_is_what_they_were_decoded_from(shard, seed, phase):
    grid, first, numel = shard
    block, num_blocks = grid.block_numbers(first, numel)
    tiles = tiles_of(grid, first, numel)
    dither = in_blocks(phase, first, numel, grid)
    codes, rows = CODE.encoded(values(numel, seed), block, tiles, dither)
    assert rows.numel() == num_blocks
    again = CODE.decode(codes, rows[block], 1.0)
    for threshold in (None, dither, in_blocks(phase ^ 0xFFFF0000, first, numel, grid)):
        other_codes, other_rows = CODE.encoded(again, block, tiles, threshold)
        assert torch.equal(codes, other_codes) and torch.equal(rows, other_rows)


@given(shards(), st.integers(0, 59), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_shared_code_of_a_value_that_is_not_zero_is_a_normal_number(shard, seed, phase):
    grid, first, numel = shard
    block, _ = grid.block_numbers(first, numel)
    x = values(numel, seed)
    dither = in_blocks(phase, first, numel, grid)
    codes, rows = CODE.encoded(x, block, tiles_of(grid, first, numel), dither)
    decoded = CODE.decode(codes, rows[block], 1.0)
    assert decoded.isfinite().all() and (decoded[x > 0] >= 2.0**-126).all()


@pytest.mark.parametrize("shape", [(64, 256), (3, 256), (70, 100)])
def test_shared_code_of_a_product_of_rows_and_columns_errs_by_half_a_level(shape):
    """Columns are alike within each code, so that the means are the columns' own.

    A nearest level errs by at most 1/32 of the ratio; so does the sum of levels, by which a row is
    divided: 1/31 of the row.
    """
    rows, columns = shape
    row = torch.exp2(torch.linspace(-20, 20, rows))
    column = torch.exp2(-torch.arange(columns).div(64).floor() * 1.3)
    x = torch.outer(row, column).flatten()
    grid = BlockGrid.of(shape, 256)
    block, _ = grid.block_numbers(0, x.numel())
    codes, of_rows = CODE.encoded(x, block, tiles_of(grid, 0, x.numel()), None)
    error = (CODE.decode(codes, of_rows[block], 1.0) / x - 1).abs().max()
    assert error <= 1.0 / 32 + 1.0 / 31


def test_shared_rows_and_values_at_the_limits_stay_in_them():
    grid = BlockGrid.of((2, 64), 64)
    block, _ = grid.block_numbers(0, 128)
    x = torch.cat([torch.full((64,), 3e38), torch.full((64,), 2.0**-126)])
    codes, rows = CODE.encoded(x, block, tiles_of(grid, 0, 128), None)
    assert rows.tolist() == [MAX_ROW, MIN_ROW] and set(codes.tolist()) == {255}
    assert LIMIT > MAX_ROW
