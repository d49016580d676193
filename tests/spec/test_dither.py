# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from zero8.spec import dither

A = 0xC13FA9A9  # 2^32 / plastic number
PHI = 0x9E3779B9  # 2^32 / golden ratio
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


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ (x >> 16)


@pytest.mark.parametrize("first", FIRSTS.values(), ids=FIRSTS)
@pytest.mark.parametrize(("key", "step"), [(0, 1), (MASK, 2), (0x12345678, 10**9)])
def test_dithered_any_element_matches_equation_d1(first, key, step):
    phase = dither.phase_of(key, step)
    start = lowbias32((key + step // 32 * A) % 2**32)
    wanted = [(i * A + key + step * PHI + start) % 2**32 for i in range(first, first + 40)]
    assert dither.dithered(phase, first, 40).tolist() == wanted
    assert dither.hashed(phase, first, 40).tolist() == [lowbias32(r) for r in wanted]


def test_dithered_empty_range_is_empty():
    assert dither.dithered(1, 5, 0).shape == dither.hashed(1, 5, 0).shape == (0,)


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


def discrepancy(points: list[int]) -> float:
    """N times the star discrepancy of N 32-bit points."""
    numel = len(points)
    ordered = torch.tensor(sorted(points), dtype=torch.float64) * (numel / 2**32)
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
    """Guards the two tests above: the bound tells a rotation from independent numbers."""
    points = dither.hashed(0, 1, 2**16).tolist()
    assert discrepancy(points) > bound_on_discrepancy(PHI, 2**16)


def test_hashed_bits_of_neighbours_are_independent():
    """Each bit of 2^16 values is a fair coin, and so is its equality with the next element's.

    A count over n fair coins leaves 5 standard deviations, 5 sqrt(n)/2, once in 1.7 million.
    """
    n = 2**16
    values = dither.hashed(dither.phase_of(99, 1), 0, n + 1)
    for bit in range(32):
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


@pytest.mark.parametrize("index", [0, 1, 12345, "a", "layers.0.weight"])
def test_identity_of_anything_fits_int64(index):
    assert torch.tensor(dither.identity_of(index)).dtype == torch.int64
