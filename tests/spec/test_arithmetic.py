# SPDX-License-Identifier: Apache-2.0
"""The reference arithmetic against exact rational numbers, rounded once by the oracle below."""

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from zero8.spec import arithmetic as ieee

TINY = 2.0**-126  # the smallest normal number
STEP = 2.0**-149  # the smallest subnormal one
HUGE = (2 - 2.0**-23) * 2.0**127
SPECIAL = [0.0, 1.0, 1.5, STEP, TINY - STEP, TINY, TINY + STEP, 2.0**64, HUGE, math.inf]
SPECIAL = [s * x for x in SPECIAL for s in (1.0, -1.0)] + [math.nan]


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < TINY else x


def rounded(exact: Fraction) -> float:
    """Round a nonzero number to 24 bits, half to even, then flush it to zero or infinity."""
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    ulp = Fraction(2) ** (exponent - 23)
    value = round(magnitude / ulp) * ulp  # Python rounds half to even
    if value < Fraction(TINY):
        return math.copysign(0.0, exact)
    return math.copysign(math.inf if value > Fraction(HUGE) else float(value), exact)


def exact_fma(a: float, b: float, c: float) -> float:
    a, b, c = flushed(a), flushed(b), flushed(c)
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact:
        return rounded(exact)
    # Both zeros negative: -0; any other way to zero: +0.
    product_sign = math.copysign(1, a) * math.copysign(1, b)
    zeros = Fraction(a) * Fraction(b) == 0
    return -0.0 if zeros and product_sign < 0 and math.copysign(1, c) < 0 else 0.0


def exact_mul(a: float, b: float) -> float:
    a, b = flushed(a), flushed(b)
    if not (math.isfinite(a) and math.isfinite(b)) or a * b == 0 and 0.0 in (a, b):
        return a * b
    return rounded(Fraction(a) * Fraction(b))


def exact_div(a: float, b: float) -> float:
    a, b = flushed(a), flushed(b)
    if b == 0.0:
        sign = math.copysign(1, a) * math.copysign(1, b)
        return math.nan if a == 0.0 or math.isnan(a) else sign * math.inf
    if a == 0.0 or not (math.isfinite(a) and math.isfinite(b)):
        return a / b
    return rounded(Fraction(a) / Fraction(b))


def exact_sqrt(a: float) -> float:
    a = flushed(a)
    if a == 0.0 or a == math.inf:
        return a
    if not a > 0.0:
        return math.nan
    # 100 extra bits of the root and one sticky bit stand for the irrational number.
    root = math.isqrt(int(Fraction(a) * 2**400))
    sticky = 0 if root * root == Fraction(a) * 2**400 else 1
    return rounded(Fraction(2 * root + sticky, 2**201))


def assert_exact(function, oracle, *columns):
    columns = [[float(np.float32(x)) for x in column] for column in columns]
    got = function(*(torch.tensor(column, dtype=torch.float32) for column in columns))
    assert got.dtype == torch.float32
    for value, *arguments in zip(got.tolist(), *columns, strict=True):
        wanted = oracle(*arguments)
        same = math.isnan(value) and math.isnan(wanted)
        same |= value == wanted and math.copysign(1, value) == math.copysign(1, wanted)
        assert same, f"{[x.hex() for x in arguments]}: {value.hex()}, expected {wanted.hex()}"


def float32s(rng: random.Random, count: int, low: int, high: int) -> list[float]:
    """Numbers of random sign and mantissa with exponents in low..high - 1."""
    return [
        rng.choice((-1, 1))
        * math.ldexp(1 + rng.getrandbits(23) * 2.0**-23, rng.randrange(low, high))
        for _ in range(count)
    ]


def cancelling(rng: random.Random) -> list[tuple[float, float, float]]:
    """c is the product rounded, or a few ulps beside it: what is left is its rounding error."""
    triples = []
    for a, b in zip(float32s(rng, 1000, -60, 60), float32s(rng, 1000, -60, 60), strict=True):
        c = np.float32(a * b)
        for _ in range(rng.randrange(3)):
            c = np.nextafter(c, np.float32(rng.choice((-math.inf, math.inf))))
        triples.append((a, b, -float(c)))
    return triples


def halfway(rng: random.Random) -> list[tuple[float, float, float]]:
    """Sums on and next to the middle of two floats, nearer than binary64 can tell.

    Half an ulp of c is 1; (1+e)(1-e) = 1 - e^2 lies 2^-46 or less beside it.  Near e = 2^-14,
    the binary64 sum is its last number before the middle, and on either side of the exact one.
    """
    triples = []
    for e in [0.0, *(2.0**-k for k in range(1, 24)), *(i * 2.0**-23 for i in range(500, 525))]:
        for c in (2.0**24, 2.0**24 + 2, 2.0**25 - 2, 2.0**24 + 2 * rng.getrandbits(22)):
            for a, b in ((1 + e, 1 - e), (1 + e, 1.0), (1 - e, 1.0), (1 + e, 1 + e)):
                triples += [(a, b, c), (-a, b, c), (a, b, -c), (-a, b, -c)]
                # Far apart: the product is below the last bit of a binary64 sum.
                triples += [(a * 2.0**-40, b * 2.0**-40, c + 1 if c < 2**24 - 1 else c)]
                triples += [(a * 2.0**40, b * 2.0**40, c * STEP * 2.0**60)]
    return triples


def near_flush(rng: random.Random) -> list[tuple[float, float, float]]:
    """Results around 2^-126: the last quarter ulp below it rounds up, all else is flushed."""
    triples = []
    for k in range(-4, 5):
        # 2^-126 - 2^-151 (1 + k * 2^-23): the middle of the last two 24-bit numbers is at k = 0.
        a = 2.0**-75 * (1 + k * 2.0**-23)
        for sign in (1, -1):
            triples += [(-sign * a, 2.0**-76, sign * TINY), (sign * a, 2.0**-76, -sign * TINY)]
            triples += [(sign * (1 + k * 2.0**-23), TINY, 0.0), (a, sign * 2.0**-51, -0.0)]
    triples += zip(
        float32s(rng, 500, -66, -58),
        float32s(rng, 500, -66, -58),
        float32s(rng, 500, -130, -122),
        strict=True,
    )
    return triples


FMA_CASES = {
    "cancellation": cancelling,
    "half-way": halfway,
    "flush boundary": near_flush,
    "random": lambda rng: list(
        zip(*(float32s(rng, 2000, low, low + 40) for low in (-20, -20, -20)), strict=True)
    ),
    "overflow": lambda rng: list(
        zip(*(float32s(rng, 500, low, high) for low, high in ((60, 66), (60, 66), (120, 128))),
            strict=True)
    ) + [(HUGE, 1.0, 2.0**103), (HUGE, 1.0, 2.0**103 - 2.0**80), (-HUGE, 1.0, -(2.0**103))],
}  # fmt: skip


@pytest.mark.parametrize("make", FMA_CASES.values(), ids=FMA_CASES)
def test_fma_adversarial_triples_round_once(make):
    triples = make(random.Random(1))
    assert_exact(ieee.fma, exact_fma, *zip(*triples, strict=True))


def test_fma_special_values_follow_ieee():
    triples = list(itertools.product(SPECIAL, repeat=3))
    assert_exact(ieee.fma, exact_fma, *zip(*triples, strict=True))


def pairs_near_flush(rng: random.Random) -> list[tuple[float, float]]:
    """Pairs whose product, and whose quotient, lie around 2^-126; and all special pairs."""
    pairs = list(itertools.product(SPECIAL, repeat=2))
    for k in range(-6, 7):
        near = 1 + k * 2.0**-23
        pairs += [(near, TINY), (near * 2.0**-63, 2.0**-63 * (1 - 2.0**-24)), (-near, TINY)]
        pairs += [(near * 2.0**-62, -(2.0**-64) * (1 + 2.0**-23))]
        pairs += [(near * 2.0**-60, 2.0**66), (near * 2.0**-60, 2.0**66 * (1 + 2.0**-23))]
        pairs += [(near * 2.0**-60, -(2.0**66) * (1 - 2.0**-24)), (near * TINY, 1.0 + 2.0**-23)]
    pairs += zip(float32s(rng, 1000, -70, -56), float32s(rng, 1000, -70, -56), strict=True)
    pairs += zip(float32s(rng, 1000, -70, -56), float32s(rng, 1000, 56, 70), strict=True)
    return pairs


@pytest.mark.parametrize("flush", [False, True], ids=["subnormals kept", "subnormals flushed"])
@pytest.mark.parametrize("operation", ["mul", "div"])
def test_mul_and_div_near_flush_boundary_round_once(operation, flush):
    """Whatever the thread's own treatment of subnormals is."""
    oracle = {"mul": exact_mul, "div": exact_div}[operation]
    columns = zip(*pairs_near_flush(random.Random(2)), strict=True)
    torch.set_flush_denormal(flush)
    try:
        assert_exact(getattr(ieee, operation), oracle, *columns)
    finally:
        torch.set_flush_denormal(False)


def test_sqrt_any_value_rounds_once():
    rng = random.Random(3)
    values = [abs(x) for x in float32s(rng, 2000, -126, 128)]
    # Squares of 12-bit numbers have exact roots; their neighbours are the hardest to round.
    squares = [float(n * n) for n in range(2049, 4096, 7)]
    values += squares + [x + d for x in squares for d in (-1.0, 1.0)]
    assert_exact(ieee.sqrt, exact_sqrt, values + SPECIAL)
