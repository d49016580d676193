# SPDX-License-Identifier: Apache-2.0

import pytest

from zero8.spec import dither
from zero8.spec.grid import BlockGrid

A = 0xC13FA9A9  # 2^32 / plastic number
PHI = 0x9E3779B9  # 2^32 / golden ratio
C = 32 * 1601
MASK = 0xFFFFFFFF
IDENTITY_OF_NAME = 132451008180050332
IDENTITY_OF_INDEX = -9038251686706740244
KEY_OF_MOMENT, KEY_OF_PARAM, KEY_OF_PARAM_SEED_1 = 0x95ACDECE, 0xB2694450, 0x8F651D7D
FIRSTS = {
    "start": 0,
    "across 2^31": 2**31 - 10,
    "across 2^32": 2**32 - 10,
    "5e9": 5_000_000_000,
    "2^62": 2**62,
}
GRIDS = {
    "whole blocks": BlockGrid(2**60, 1024, 256),
    "last block of a row is short": BlockGrid(2**60, 700, 256),
    "rows shorter than a block": BlockGrid(2**60, 65, 4096),
    "smallest blocks": BlockGrid(2**60, 129, 64),
}
every_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ (x >> 16)


@pytest.mark.parametrize("first", FIRSTS.values(), ids=FIRSTS)
@pytest.mark.parametrize(("key", "step"), [(0, 1), (MASK, 2), (7, 32), (0x12345678, 10**9)])
def test_dithered_any_element_matches_equation_d1(first, key, step):
    phase = dither.phase_of(key, step)
    start = lowbias32((key + step // 32 * A) % 2**32)
    walked = step * PHI if step // 32 % 2 else -step * PHI
    wanted = [(i * A + key + walked + start) % 2**32 for i in range(first, first + 40)]
    assert dither.dithered(phase, first, 40).tolist() == wanted
    assert dither.hashed(phase, first, 40).tolist() == [lowbias32(r) >> 16 for r in wanted]


@every_grid
@pytest.mark.parametrize("first", FIRSTS.values(), ids=FIRSTS)
@pytest.mark.parametrize(("key", "step"), [(0, 1), (MASK, 2), (0x12345678, 10**9)])
def test_in_blocks_any_element_matches_equation_d2(grid, first, key, step):
    """Ranges of 1500 elements begin inside a block, or at one, and cross blocks and rows."""
    phase = dither.phase_of(key, step)
    wanted = []
    for i in range(first, first + 1500):
        column = i % grid.row_length
        start = i - column + column // grid.block_size * grid.block_size
        wanted.append((((start * A + phase) % 2**32 >> 16) + (i - start) * C) % 2**16)
    assert dither.in_blocks(phase, first, 1500, grid).tolist() == wanted


def test_identity_of_name_or_index_is_stable():
    """Saved states carry identities and the dither goes on from them: they may never change."""
    assert dither.identity_of("layers.0.weight") == IDENTITY_OF_NAME
    assert dither.identity_of(0) == IDENTITY_OF_INDEX
    assert dither.identity_of("0") != dither.identity_of(0)


def test_stream_key_streams_and_seeds_differ_and_are_stable():
    identity = dither.identity_of("layers.0.weight")
    assert dither.stream_key(0, identity, "exp_avg_sq") == KEY_OF_MOMENT
    assert dither.stream_key(0, identity, "param") == KEY_OF_PARAM
    assert dither.stream_key(1, identity, "param") == KEY_OF_PARAM_SEED_1
    assert dither.stream_key(0, identity + 1, "param") not in (KEY_OF_PARAM, KEY_OF_PARAM_SEED_1)
