# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

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


@every_grid
@pytest.mark.parametrize("first", [1, 63, 64, 255, 256, 500, 700, 1999])
def test_in_blocks_of_a_segment_are_those_of_the_whole_parameter(grid, first):
    whole = dither.in_blocks(0x89ABCDEF, 0, 2000, grid)
    assert torch.equal(dither.in_blocks(0x89ABCDEF, first, 2000 - first, grid), whole[first:])


def largest_quotient(constant: int, numel: int) -> int:
    """Largest partial quotient of constant / 2^32 among convergents of denominator <= numel."""
    numerator, denominator = constant, 2**32
    before, q, largest = 1, 0, 0  # denominators of the convergents
    while numerator:
        quotient, rest = divmod(denominator, numerator)
        before, q = q, quotient * q + before
        if q > numel:
            break
        largest = max(largest, quotient)
        denominator, numerator = numerator, rest
    return largest


def discrepancy(points: list[int], num_bits: int = 32) -> float:
    """N times the star discrepancy of N points of `num_bits` bits."""
    numel = len(points)
    ordered = torch.tensor(sorted(points), dtype=torch.float64) * (numel / 2**num_bits)
    rank = torch.arange(numel, dtype=torch.float64)
    return float(torch.maximum(rank + 1 - ordered, ordered - rank).max())


def bound_on_discrepancy(constant: int, numel: int) -> float:
    """Bound on N times the star discrepancy of the first N points of a rotation.

    With partial quotients of at most K it is 3 + (1/ln(golden ratio) + K/ln(K+1)) ln N: Kuipers
    and Niederreiter, Uniform Distribution of Sequences, theorem 2.3.4.
    """
    k = largest_quotient(constant, numel)
    golden = (1 + math.sqrt(5)) / 2
    return 3 + (1 / math.log(golden) + k / math.log(k + 1)) * math.log(numel)


def test_largest_quotient_golden_and_plastic_are_small():
    """The continued fractions begin [0; 1, 1, 1, ...] and [0; 1, 3, 12, 1, 1, 3, ...]."""
    assert largest_quotient(PHI, 2**12) == 1
    assert largest_quotient(A, 2**12) == 12


@pytest.mark.parametrize("numel", [1000, 2**16])
def test_dithered_over_elements_is_equidistributed(numel):
    points = dither.dithered(0, 1, numel).tolist()
    assert discrepancy(points) <= bound_on_discrepancy(A, numel)


@pytest.mark.parametrize("run", [0, 1, 17, 10**6])
def test_dithered_over_a_run_of_steps_is_equidistributed(run):
    points = [dither.phase_of(0, t) for t in range(32 * run, 32 * run + 32)]
    assert discrepancy(points) <= bound_on_discrepancy(PHI, 32)


def test_in_blocks_thresholds_repeat_after_2048_elements():
    """The step is an odd multiple of 32."""
    assert dither.IN_BLOCK_STEP == C
    q = dither.in_blocks(12345, 0, 4096, BlockGrid(1, 4096, 4096))
    assert torch.equal(q[2048:], q[:2048])
    # Each of the 2048 thresholds that differ in more than their lowest 5 bits, once.
    assert sorted((q[:2048] >> 5).tolist()) == list(range(2048))


def test_in_blocks_every_sixteenth_of_the_range_has_15_to_17_of_256_elements():
    """Whatever the block starts with: all 2048 starts, and all steps of some runs."""
    grid = BlockGrid(1, 256, 256)
    phases = [start << 21 for start in range(2048)]
    phases += [int(dither.phase_of(7, step)) for step in range(256)]
    for phase in phases:
        counts = (dither.in_blocks(phase, 0, 256, grid) >> 12).bincount(minlength=16)
        assert 15 <= int(counts.min()) and int(counts.max()) <= 17


@pytest.mark.parametrize("block_size", [64, 128, 256, 512, 1024, 2048, 4096])
def test_in_blocks_neighbouring_blocks_start_elsewhere(block_size):
    """Of 40 successive blocks none begins with another's threshold; with 256, as in (D1)."""
    grid = BlockGrid(1, 40 * block_size, block_size)
    starts = dither.in_blocks(99, 0, grid.row_length, grid)[::block_size]
    assert len(set((starts >> 5).tolist())) == 40
    assert torch.equal(starts, dither.dithered(99, 0, grid.row_length)[::block_size] >> 16)


def test_in_blocks_at_one_place_of_many_blocks_are_equidistributed():
    """A rotation by 256 A, rounded down to 16 bits: this moves N D by less than N / 2^16."""
    grid, num_blocks = BlockGrid(1, 2**22, 256), 2**14
    bound = bound_on_discrepancy(256 * A % 2**32, num_blocks) + num_blocks / 2**16
    assert bound < 0.01 * num_blocks
    q = dither.in_blocks(1, 0, 2**22, grid)
    for place in (0, 1, 100, 255):
        assert discrepancy(q[place::256].tolist(), 16) <= bound


@pytest.mark.parametrize("run", [0, 1, 17, 10**6])
@pytest.mark.parametrize("element", [0, 1, 255, 256, 700 + 511])
def test_in_blocks_of_an_element_over_a_run_of_steps_are_equidistributed(run, element):
    """A rotation by PHI, rounded down to 16 bits: this moves N D by less than N / 2^16."""
    grid = GRIDS["last block of a row is short"]
    phases = [int(dither.phase_of(3, t)) for t in range(32 * run, 32 * run + 32)]
    points = [int(dither.in_blocks(phase, element, 1, grid)) for phase in phases]
    assert discrepancy(points, 16) <= bound_on_discrepancy(PHI, 32) + 32 / 2**16


@pytest.mark.parametrize("period", [32, 34, 55, 89, 144, 233, 377, 610, 987])
def test_dithered_a_period_later_is_no_nearer_than_by_chance(period):
    """The distance on a circle of independent points is uniform in 0..1/2: mean 1/4, variance 1/48.

    Golden-ratio steps alone come back to within 0.02 of where they were after 34 of them.
    Distances within a run are equal, so 3200 steps hold 100 independent ones: 5 standard
    deviations.
    """
    phases = [dither.phase_of(5, t) for t in range(3200 + period)]
    steps = [(b - a) % 2**32 / 2**32 for a, b in zip(phases, phases[period:], strict=False)]
    mean = sum(min(x, 1 - x) for x in steps) / len(steps)
    assert abs(mean - 0.25) < 5 * math.sqrt(1 / 48 / 100)


def test_discrepancy_independent_numbers_exceed_the_bound():
    """Guards the tests above: the bound tells a rotation from independent numbers."""
    points = dither.hashed(0, 1, 2**16).tolist()
    assert discrepancy(points, 16) > bound_on_discrepancy(PHI, 2**16)


def test_hashed_bits_of_neighbours_are_independent():
    """Each bit of 2^16 values is a fair coin, and so is its equality with the next element's.

    A count over n fair coins leaves 5 standard deviations, 5 sqrt(n)/2, once in 1.7 million.
    """
    n = 2**16
    values = dither.hashed(dither.phase_of(99, 1), 0, n + 1)
    for bit in range(16):
        x = values >> bit & 1
        assert abs(int(x[:n].sum()) - n / 2) < 5 * math.sqrt(n) / 2
        assert abs(int((x[:n] ^ x[1:]).sum()) - n / 2) < 5 * math.sqrt(n) / 2


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
