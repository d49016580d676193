# SPDX-License-Identifier: Apache-2.0
"""The four moment codes, element by element; tests/spec/test_codec_blocks.py has whole blocks."""

import hashlib
import sys
from fractions import Fraction

import pytest
import torch
from processes import run

from zero8.spec import arithmetic as ieee
from zero8.spec import dither
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, codec_named, codec_numbered, quantize
from zero8.spec.grid import BlockGrid
from zero8.spec.log import LogCode, SignedLogCode

pytestmark = pytest.mark.usefixtures("one_torch_thread")
DYNAMIC = {
    which: CODECS["dynamic"].code_of(ADAM.moment(which)) for which in ("exp_avg", "exp_avg_sq")
}
ONE = 0x3F800000  # bits of 1.0


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32).to(torch.int64)


def from_bits(pattern: torch.Tensor) -> torch.Tensor:
    return pattern.to(torch.int32).view(torch.float32)


def dithers(numel: int) -> dict[str, torch.Tensor | None]:
    """Nearest, the two extreme thresholds, and ordinary ones."""
    return {
        "nearest": None,
        "lowest": torch.zeros(numel, dtype=torch.int64),
        "highest": torch.full((numel,), 0xFFFF),
        "ordinary": dither.in_blocks(0x2468ACE0, 11, numel, BlockGrid(1, 2**40, 256)),
    }


# --- What all codes but v's of `log` do ----------------------------------------------------------


def signed(limit: int, bits: int = 8) -> torch.Tensor:
    """Return the codes from -limit to limit, in two's complement."""
    return (torch.arange(-limit, limit + 1) & (1 << bits) - 1).to(torch.uint8)


ALL = torch.arange(256, dtype=torch.uint8)
FP8 = {"m": torch.cat([ALL[:127], ALL[129:255]]), "v": ALL[:127]}
LOGS = {f"{name} m": CODECS[name].of_signed for name in ("log", "log6")}
LONG_LIVED = {f"{name} long-lived m": CODECS[name].of_dithered for name in ("log", "log6")}
# By name: the code, the codes that quantize makes, and scales.
CODES = {
    "dynamic m": (DYNAMIC["exp_avg"], ALL, [1.0, -1.0, 3.7e-20, -0.1, 2.0**126, 2.0**-104]),
    "dynamic v": (DYNAMIC["exp_avg_sq"], ALL, [1.0, 3.7e-20, 0.1, 2.0**126, 2.0**-104]),
    "fp8 m": (CODECS["fp8"].of_signed, FP8["m"], [1.0, 3.7e-20, 0.1, 2.0**117, 2.0**-117]),
    "fp8 v": (CODECS["fp8"].of_unsigned, FP8["v"], [1.0, 3.7e-20, 0.1, 2.0**117, 2.0**-117]),
    "linear4 m": (CODECS["linear4"].of_signed, ALL[:16], [1.0, -1.0, 3.7e-20, -0.1, 2.0**-118]),
    "linear4 v": (CODECS["linear4"].of_unsigned, ALL[:16], [1.0, 3.7e-20, 0.1, 2.0**126]),
    **{
        name: (code, signed(code.largest, code.bits), [1.0, -1.0, 3.7e-20, -0.1, 5.5e15])
        for name, code in LOGS.items()
    },
    **{
        name: (code, signed(code.largest, code.bits), torch.arange(1, 2, 2.0**-8).tolist())
        for name, code in LONG_LIVED.items()
    },
}
of_each_code = pytest.mark.parametrize(("code", "codes", "scales"), CODES.values(), ids=CODES)


def level_of(code, codes: torch.Tensor, is_wide: bool = False) -> torch.Tensor:
    """Return what codes decode to with a scale of 1, or -1 of the wide levels."""
    return code.decode(codes, torch.full(codes.shape, -1.0 if is_wide else 1.0), 1.0)


def usable(code, scale: float) -> float:
    """Return the nearest scale of which products are exact, where blocks have such alone."""
    if not hasattr(code, "TOP"):
        return scale
    return float(code.scales(torch.tensor([448 * scale]), torch.tensor([0]), 1))


@of_each_code
def test_encode_of_all_codes_returns_what_was_decoded(code, codes, scales):
    for scale in (usable(code, one) for one in scales):
        every = torch.full((len(codes),), scale)
        is_wide = scale < 0 and isinstance(code, SignedLogCode)
        x = code.decode(codes, every, 1.0)
        factor = every.abs() if is_wide else every
        exact = level_of(code, codes, is_wide).double() * factor.double()
        assert torch.equal(x, exact.float())
        for dithering, thresholds in dithers(len(codes)).items():
            assert torch.equal(code.encode(x, every, thresholds), codes), dithering


@of_each_code
@pytest.mark.parametrize("gain", [0.9, 0.999], ids=repr)
def test_decode_with_a_gain_multiplies_the_scale_first(code, codes, scales, gain):
    """Two roundings, (C1): of scale * gain, and of the product with the level."""
    wanted = ieee.mul(level_of(code, codes), ieee.mul(0.37, gain))
    assert torch.equal(code.decode(codes, torch.full((len(codes),), 0.37), gain), wanted)


SETS = {name: (code, codes, False) for name, (code, codes, _) in CODES.items()}
SETS |= {f"{name}, wide": (code, CODES[name][1], True) for name, code in LOGS.items()}


@pytest.mark.parametrize(("code", "codes", "is_wide"), SETS.values(), ids=SETS)
def test_encode_at_every_boundary_is_nearest(code, codes, is_wide):
    """Two floats on either side of every level and of the middle of any two.

    A tie goes up, of magnitudes in `log`, and in `fp8` to the even code.  The scale is 1, so that
    the normalized value is x itself, or in `log` y = 1 + |x|, which is exact for the x = y - 1
    chosen here.  Distances between these float32 numbers are exact in binary64, so the brute-force
    search sees no rounding.
    """
    is_log, is_even = isinstance(code, SignedLogCode), hasattr(code, "TOP")
    if is_log or is_even:
        codes = codes[level_of(code, codes) >= 0]  # the others are their negatives
    shift = 1.0 if is_log else 0.0
    levels, order = level_of(code, codes, is_wide).sort()
    codes, levels = codes[order], levels.double() + shift
    y = torch.cat([(levels[:-1] + levels[1:]) / 2, levels]).float()
    for _ in range(2):
        y = torch.cat([y, y.nextafter(torch.tensor(999.0)), y.nextafter(torch.tensor(-999.0))])
    x = ieee.flush((torch.cat([y, 2 * y.max().view(1)]) - shift).unique())
    x = x if code.signed and not (is_log or is_even) else x[x >= 0]
    distance = (x.double() + shift)[:, None].sub(levels).abs()
    nearest = len(codes) - 1 - distance.flip(1).argmin(1)  # the last of equals
    if is_even:
        ties = (distance == distance.min(1, keepdim=True).values).sum(1) == 2
        assert ties.sum() == len(codes) - 1
        nearest -= (ties & (codes[nearest] % 2 == 1)).long()
    if not code.signed and level_of(code, codes[:1]) == 0:  # what is not 0 stays so
        nearest = torch.where(x > 0, nearest.clamp(min=1), nearest)
    assert len(x) >= 5 * (len(codes) - 1) - 2
    every = torch.full(x.shape, -1.0 if is_wide else 1.0)
    found = code.encode(x, every, None)
    assert torch.equal(found, codes[nearest])
    if code.signed and (is_log or is_even):
        negative = (-found.int() & (1 << code.bits) - 1) if is_log else found.int() | 128
        negative = torch.where(found == 0, 0, negative).to(torch.uint8)
        assert torch.equal(code.encode(-x, every, None), negative)


# --- Names, numbers and the dynamic maps ---------------------------------------------------------


def test_codec_names_and_numbers_are_stable():
    """Files carry the numbers."""
    numbers = {name: codec.number for name, codec in CODECS.items()}
    assert numbers == {"dynamic": 1, "log": 4, "log6": 6, "fp8": 5, "linear4": 7}
    assert all(codec_numbered(c.number) is codec_named(c.name) is c for c in CODECS.values())


def test_codec_unknown_name_raises():
    known = "'dynamic', 'fp8', 'linear4', 'log', 'log6'"
    with pytest.raises(ValueError, match=f"got 'fp4', expected one of .{known}"):
        codec_named("fp4")


@pytest.mark.parametrize("number", [0, 2, 3, 9])
def test_codec_unknown_number_raises(number):
    with pytest.raises(ValueError, match=rf"codec number {number} is unknown .*dynamic.*log"):
        codec_numbered(number)


DIGESTS = {
    "exp_avg": "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c",
    "exp_avg_sq": "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398",
}
PRINT_DIGESTS = """
import hashlib
import torch
from zero8.spec.dynamic import DynamicCode
assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
for signed in (True, False):
    print(hashlib.sha256(DynamicCode(signed).levels.numpy().tobytes()).hexdigest())
"""


@pytest.mark.parametrize(("which", "digest"), DIGESTS.items())
def test_dynamic_map_equals_that_of_bitsandbytes(which, digest):
    """The digests are of bitsandbytes 0.50.2's `create_dynamic_map`, as float32."""
    levels = DYNAMIC[which].levels
    assert levels.dtype == torch.float32 and levels.shape == (256,)
    assert hashlib.sha256(levels.numpy().tobytes()).hexdigest() == digest


def test_dynamic_map_is_the_same_where_torch_computes_without_fma():
    done = run([sys.executable, "-c", PRINT_DIGESTS], ATEN_CPU_CAPABILITY="default")
    assert done.stdout.split() == list(DIGESTS.values()), done.stderr


@pytest.mark.parametrize(("which", "gap"), [("exp_avg", 0.0141), ("exp_avg_sq", 0.0070)])
def test_dynamic_gaps_are_as_documented(which, gap):
    assert round(float(DYNAMIC[which].levels.diff().max()), 4) == gap


# --- Octaves, the levels of first moments ---------------------------------------------------------

SIGNED = CODECS["log"].of_signed
OCTAVES = {"narrow": SIGNED.narrow, "wide": SIGNED.wide}
SHAPES = {"narrow": (4, 32, 14.75), "wide": (8, 16, 247.0)}  # octaves, levels in each, the largest
SIGNS = {"narrow": 1, "wide": -1}  # of the scale
PRODUCED = torch.arange(-127, 128)
both_sets = pytest.mark.parametrize("name", OCTAVES)


def as_codes(integers: torch.Tensor) -> torch.Tensor:
    return (integers & 255).to(torch.uint8)


def as_integers(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.int8).to(torch.int64)


@both_sets
def test_octaves_levels_are_octaves_above_one(name):
    """Equation (C3), and after the 128 levels what -128 decodes to."""
    levels, (octaves, per_octave, top) = OCTAVES[name].levels, SHAPES[name]
    exact = [
        (1 + Fraction(i, per_octave)) * 2**octave - 1
        for octave in range(octaves)
        for i in range(per_octave)
    ]
    assert [Fraction(level) for level in levels.tolist()] == [*exact, 2**octaves - 1]
    assert levels.dtype == torch.float32
    assert OCTAVES[name].top == top == exact[127]


@both_sets
def test_octaves_smallest_scale_keeps_the_first_level_normal(name):
    octaves = OCTAVES[name]
    smallest, top = octaves.min_scale, octaves.top
    assert smallest * float(octaves.levels[1]) == 2.0**-126
    absmax = torch.tensor([0.0, 2.0**-126, smallest, 0.99 * smallest * top, smallest * top])
    assert octaves.scales(absmax).tolist() == [0.0] + [smallest] * 4
    assert octaves.scales(2 * absmax)[4] == 2 * smallest


@both_sets
def test_encode_signed_log_never_produces_the_code_of_minus_128(name):
    """It decodes to the next level, so a step that reads it goes on; 127 is what it writes."""
    x = torch.tensor([-1e30, -300.0, -14.8, -15.0, -247.1, -255.0, -(2.0**126)])
    scales = torch.full_like(x, SIGNS[name])
    codes = SIGNED.encode(x, scales, None)
    assert (codes != 128).all()
    assert (as_integers(codes)[:2] == -127).all()
    minus_128 = SIGNED.decode(torch.tensor([128], dtype=torch.uint8), scales[:1], 1.0)
    assert float(minus_128) == {"narrow": -15.0, "wide": -255.0}[name]
    assert as_integers(SIGNED.encode(minus_128, scales[:1], None)).tolist() == [-127]


@both_sets
def test_octaves_scale_of_every_mantissa_is_a_fixpoint(name):
    """A block's extreme decodes to scale * top, which has to give the same scale again, (C4).

    Exhaustive over the 2^23 mantissas of one octave; other octaves differ by an exact factor.
    """
    octaves, top = OCTAVES[name], SHAPES[name][2]
    for start in range(0, 2**23, 2**20):
        absmax = from_bits(torch.arange(ONE + start, ONE + start + 2**20))
        scale = absmax / top
        assert torch.equal(scale * top / top, scale)
        # And a sample through the code itself.
        sample = slice(start % 64, None, 256)
        assert torch.equal(octaves.scales(absmax[sample]), scale[sample])
        assert torch.equal(octaves.scales(scale[sample] * top), scale[sample])


@both_sets
def test_octaves_decoded_values_stay_within_2_ulps_of_their_level(name):
    """So that they are far from the ends of cells, which are 2^18 ulps and more.

    l * scale and 1/scale are rounded once each, so y is within l * 2^-23 (1 + 2^-25) of 1 + l
    before it is rounded.  An ulp of y is more than 2^-24 y: that is less than 2 ulps, and rounding
    goes to one of the floats between.
    """
    octaves, generator = OCTAVES[name], torch.Generator().manual_seed(6)
    extreme = 1 + torch.randint(0, 2**23, (1024,), generator=generator) * 2.0**-23
    levels = octaves.levels[:128].repeat(1024)
    scale = octaves.scales(extreme).repeat_interleave(128)
    y = ieee.fma(ieee.mul(levels, scale), ieee.div(1.0, scale), 1.0)
    assert (bits(y) - bits(1 + levels)).abs().max() <= 2


@both_sets
@pytest.mark.parametrize("beta1", [0.5, 0.8, 0.9, 0.95, 0.97, 0.978])
def test_encode_decaying_first_moment_reaches_zero(name, beta1):
    """Every code, of either sign, in blocks whose largest element stays where it is.

    Each step takes it to a smaller code of the same sign, or to 0, whatever the mantissa of the
    scale: for l = 1/32, the smallest level, y' is 2^-5 * 0.03 (1 - beta1) below 1 + l or, with
    beta1 = 0.978, 173 ulps, and the four roundings before that of y' are of 2^-24 of l each.
    """
    codes = as_codes(PRODUCED[PRODUCED != 0])
    mantissa = 1 + torch.rand(64, generator=torch.Generator().manual_seed(5))
    mantissa[0] = 1.0
    scale = SIGNS[name] * mantissa.repeat_interleave(254)
    codes = codes.repeat(64)
    scalars = ADAM.scalars(1, (1.0,), {**ADAM.options, "betas": (beta1, 0.9)}, True)
    decayed = SIGNED.decode(codes, scale, beta1)
    before, after = (
        as_integers(c) for c in (codes, SIGNED.encode(decayed, scale, None, scalars.settling))
    )
    assert (after.abs() < before.abs()).all()
    assert (after * before >= 0).all()
    # To nearest, the smallest codes stay.
    assert (SIGNED.encode(decayed, scale, None) == codes)[:254].any()


# --- The choice between narrow and wide levels ---------------------------------------------------

# The largest element 1, so that the joint is 0.75/14.75 of it.
JOINT = float(ieee.mul(0.75, ieee.div(torch.tensor(1.0), 14.75)))
BELOW = float(torch.tensor(JOINT).nextafter(torch.tensor(0.0)))


@pytest.mark.parametrize("numel", [1, 2, 31, 32, 33, 64, 128, 160, 256])
@pytest.mark.parametrize("unsampled", [BELOW, JOINT], ids=["small", "large"])
def test_signed_log_is_wide_where_fewer_than_11_of_16_sampled_elements_are_large(numel, unsampled):
    """Blocks with every possible number of sampled elements just at the joint, the others below.

    The other elements do not matter, but for the largest of all, which is one of them if it can be.
    """
    sampled = [place for place in range(numel) if place % 128 < 32]
    others = [place for place in range(numel) if place % 128 >= 32]
    generator = torch.Generator().manual_seed(numel)
    first = 0 if others else 1
    counts = range(first, len(sampled) + 1)
    x = torch.full((len(counts), numel), unsampled)
    x[:, sampled] = BELOW
    for row, large in zip(x, counts, strict=True):
        chosen = torch.tensor(sampled)[torch.randperm(len(sampled), generator=generator)[:large]]
        row[chosen] = JOINT
        row[others[-1] if others else int(chosen[0])] = 1.0
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.5, x, -x)
    block = torch.arange(len(counts)).repeat_interleave(numel)
    scale = SIGNED.scales(x.flatten(), block, len(counts))
    assert (scale < 0).tolist() == [16 * large < 11 * len(sampled) for large in counts]
    for octaves, chosen in ((SIGNED.wide, scale < 0), (SIGNED.narrow, scale > 0)):
        assert (scale.abs()[chosen] == octaves.scales(torch.tensor(1.0))).all()


def test_signed_log_places_count_from_the_part_of_the_block_that_is_there():
    """A shard that begins 32 elements into a block samples the first 32 that it has."""
    x = torch.full((128,), BELOW)
    x[:32] = 1.0
    block = torch.zeros(128, dtype=torch.int64)
    assert SIGNED.scales(x, block, 1) > 0
    assert SIGNED.scales(x[31:], block[31:], 1) < 0
    assert SIGNED.scales(x[:40], block[:40], 1) > 0


def test_signed_log_joint_among_the_wide_levels_is_in_the_lower_half_of_a_cell():
    """Nothing below the joint may round up to it or above, whatever the block's largest element."""
    k = torch.linspace(1, 2, 10_001).clamp(max=2 - 2.0**-23)
    joint = ieee.mul(0.75, SIGNED.narrow.scales(k))
    scale = SIGNED.wide.scales(k)
    rounded = SIGNED.decode(SIGNED.encode(joint, -scale, None), -scale, 1.0)
    assert (rounded < joint).all()
    assert torch.equal(rounded, ieee.mul(12.5, scale))


# --- The code of long-lived moments, (C2") -------------------------------------------------------

DITHERED = CODECS["log"].of_dithered


@pytest.mark.parametrize("level", [0, 1, 31, 32, 77, 126])
@pytest.mark.parametrize("fraction", [0.0, 2.0**-14, 0.25, 0.6180339, 0.999])
def test_encode_dithered_log_mean_over_all_thresholds_is_the_exact_position(level, fraction):
    """Of 65,536 thresholds, `fraction` go up, but for the two units that q leaves out at each end,
    its steps of four units, and half a unit of the last place of y, which is 1/8 of a unit of q.
    """
    low, high = DITHERED.narrow.levels[level : level + 2].tolist()
    x = torch.tensor(low + fraction * (high - low)).expand(65536).contiguous()
    each = torch.ones(65536), torch.arange(65536)
    up = DITHERED.encode(x, *each).int() - level
    assert up.min() >= 0 and up.max() <= 1
    assert abs(int(up.sum()) - 65536 * fraction) <= 4.125
    down = (
        DITHERED.encode(-x, torch.ones(65536), torch.arange(65536)).view(torch.int8).int() + level
    )
    assert torch.equal(down, -up)


@pytest.mark.parametrize("q", [0, 0xFFFF])
def test_quantize_dithered_log_any_threshold_keeps_the_extreme_and_the_narrow_levels(q):
    """Of all-small blocks too, for which the settling code takes the wide levels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64 * 256, generator=generator) ** 5
    block = torch.arange(64).repeat_interleave(256)
    codes, scales = quantize(DITHERED, x, block, 64, torch.full_like(block, q))
    wide = SIGNED.scales(x, block, 64) < 0
    assert wide.any() and (scales > 0).all()
    top = x.view(64, 256).abs().argmax(1)
    assert (codes.view(64, 256).view(torch.int8).gather(1, top[:, None]).abs() == 127).all()
    again = quantize(DITHERED, DITHERED.decode(codes, scales[block], 1.0), block, 64)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


# --- The logarithmic code ------------------------------------------------------------------------

LOG = LogCode()
SPANS = {"2 octaves": 2.0, "8.3 octaves": 8.3, "14 octaves": 14.0, "28 octaves": 28.0}
every_span = pytest.mark.parametrize("octaves", SPANS.values(), ids=SPANS)
FIRST_STEP, LAST_STEP = ((16 * span + 127) // 254 for span in (LOG.MIN_SPAN, LOG.MAX_SPAN))
EXTREMES = {"lowest": 0, "highest": 0xFFFF}
HIGH = 0x7F000000  # bits of a large number, so that all spans end at normal floats


def log_scale(octaves: float, high: float = 1.7) -> torch.Tensor:
    """Scales of a block with the given largest element and span in bit patterns."""
    pattern = bits(torch.tensor([high, high])) - torch.tensor([0, round(octaves * 2**23)])
    return LOG.scales(from_bits(pattern), torch.zeros(2, dtype=torch.int64), 1)[0]


def scales_of(steps: torch.Tensor) -> torch.Tensor:
    return torch.stack([from_bits(torch.full_like(steps, HIGH)), steps.float()], 1)


def position(pattern: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Exact position on the scale, in binary64: a quotient of two integers below 2^36."""
    step = scale[..., 1].long()
    base = bits(scale[..., 0].contiguous()) - (255 * step >> 4)
    return (16 * (pattern - base)).double() / step.double()


def computed_position(
    pattern: torch.Tensor, scale: torch.Tensor, threshold: int = 0
) -> torch.Tensor:
    """The fma of equation (C8), less its threshold, in binary64."""
    step = scale[..., 1].long()
    base = bits(scale[..., 0].contiguous()) - (255 * step >> 4)
    offset = (pattern - base - 8 * step).float()
    total = ieee.fma(offset, ieee.div(16.0, scale[..., 1]), 128 + threshold / 65536)
    return total.double() - threshold / 65536


@every_span
def test_encode_log_all_codes_return_what_was_decoded(octaves):
    codes, scale = torch.arange(256, dtype=torch.uint8), log_scale(octaves).expand(256, 2)
    x = LOG.decode(codes, scale, 1.0)
    assert x[0] == 0.0 and x[255] == scale[0, 0]
    assert (x[1:] > x[:-1]).all()
    for dithering, thresholds in dithers(256).items():
        assert torch.equal(LOG.encode(x, scale, thresholds), codes), dithering


def test_decode_log_levels_are_as_defined():
    """Equation (C7) with Python's integers, and one rounding for the gain."""
    for octaves in SPANS.values():
        scale = log_scale(octaves)
        high, step = int(bits(scale[:1])), int(scale[1])
        pattern = [high - 255 * step // 16 + code * step // 16 for code in range(1, 256)]
        codes, scales = torch.arange(256, dtype=torch.uint8), scale.expand(256, 2)
        x = LOG.decode(codes, scales, 1.0)
        assert x[0] == 0 and bits(x[1:]).tolist() == pattern
        assert torch.equal(LOG.decode(codes, scales, 0.999), ieee.mul(x, 0.999))


@every_span
def test_encode_log_any_element_is_within_half_a_cell(octaves):
    """Half a cell when rounded to nearest, one when dithered, by brute force on bit patterns.

    The position that is computed is within 1.5/65536 of the exact one: see below.  Dithered,
    thresholds are 16/65536 clear of both ends of a cell, which is more.
    """
    scale = log_scale(octaves)
    high = int(bits(scale[:1]))
    lowest = high - (255 * int(scale[1]) >> 4) + (int(scale[1]) >> 4)
    pattern = torch.linspace(lowest, high, 20_000, dtype=torch.float64).long()
    exact = position(pattern, scale)
    for dithering, thresholds in dithers(pattern.numel()).items():
        codes = LOG.encode(from_bits(pattern), scale.expand(pattern.numel(), 2), thresholds)
        bound = 0.5 + 1.5 / 65536 if dithering == "nearest" else 1.0
        assert (codes.double() - exact).abs().max() <= bound, dithering


def test_log_every_step_is_a_fixpoint():
    """Levels 255 and 1 have a span that gives the step again, (C8): all 14 million steps.

    Blocks hold one or the other always: their largest and their smallest element.
    """
    for start in range(FIRST_STEP, LAST_STEP + 1, 2**20):
        steps = torch.arange(start, min(start + 2**20, LAST_STEP + 1))
        span = (255 * steps >> 4) - (steps >> 4)
        assert torch.equal((16 * span.clamp(LOG.MIN_SPAN, LOG.MAX_SPAN) + 127) // 254, steps)
        assert torch.equal(steps.float().long(), steps)
        # And a sample through the code itself.
        scales = scales_of(steps[::61])
        block = torch.arange(len(scales)).repeat_interleave(2)
        codes = torch.tensor([255, 1], dtype=torch.uint8).repeat(len(scales))
        decoded = LOG.decode(codes, scales[block], 1.0)
        assert torch.equal(LOG.scales(decoded, block, len(scales)), scales)


def test_encode_log_every_code_under_many_steps_returns_what_was_decoded():
    """All codes that are not 0, under every 997th step and the last, with extreme thresholds.

    Decoded values are within 3/65536 of a cell of their code.  A level is rounded down to a unit
    of the pattern, of which a cell has 66,052 or more.  The offset from code 128 is at most 127
    cells: its conversion to a float errs by 2^-24 of it, and so does 16/step, each less than
    0.5/65536 of a cell.  The sum is below 256 and has ulps of at most 1/65536.
    """
    steps = torch.cat([torch.arange(FIRST_STEP, LAST_STEP, 997), torch.tensor([LAST_STEP])])
    for chunk in steps.split(1024):
        codes = torch.arange(1, 256, dtype=torch.uint8).repeat(len(chunk))
        scale = scales_of(chunk).repeat_interleave(255, 0)
        x = LOG.decode(codes, scale, 1.0)
        for name, threshold in EXTREMES.items():
            thresholds = torch.full((codes.numel(),), threshold)
            assert torch.equal(LOG.encode(x, scale, thresholds), codes), name
            error = computed_position(bits(x), scale, threshold & ~31 | 16) - codes.double()
            assert error.abs().max() <= 3 / 65536


def test_encode_log_ends_of_every_span_are_the_first_and_last_codes():
    """The largest element is 255 and the smallest 1, with extreme thresholds, for many spans.

    The smallest is within 12/65536 of a cell of code 1, unless it is raised to it: 16 span + 127
    is 254 step to 254 step + 253, so span is within 127/16 units of 254 step/16, and the base is
    rounded by another 15/16; a cell has more than 65536 units.  The computation errs by 1.5/65536
    as above.
    """
    generator = torch.Generator().manual_seed(2)
    ends = torch.arange(1000)
    random = torch.randint(LOG.MIN_SPAN, LOG.MAX_SPAN, (200_000,), generator=generator)
    spans = torch.cat([LOG.MIN_SPAN + ends, random, LOG.MAX_SPAN - ends])
    pattern = HIGH - torch.stack([torch.zeros_like(spans), spans], 1).flatten()
    block = torch.arange(len(spans)).repeat_interleave(2)
    scales = LOG.scales(from_bits(pattern), block, len(spans))
    assert torch.equal(scales[:, 1].long(), (16 * spans + 127) // 254)
    assert (scales[:, 1] >= FIRST_STEP).all() and (scales[:, 1] <= LAST_STEP).all()
    for name, threshold in EXTREMES.items():
        thresholds = torch.full_like(pattern, threshold)
        codes = LOG.encode(from_bits(pattern), scales[block], thresholds).view(-1, 2)
        assert (codes[:, 0] == 255).all() and (codes[:, 1] == 1).all(), name
        error = computed_position(pattern[1::2], scales, threshold & ~31 | 16) - 1
        assert error.abs().max() <= 12 / 65536


def test_encode_log_rounds_up_where_position_and_threshold_reach_the_next_code():
    """A step of 2^23 makes all exact: 1/65536 of a cell is 8 units.  q is 16 modulo 32."""
    generator = torch.Generator().manual_seed(4)
    thresholds = torch.arange(2**16).repeat(3)
    q = thresholds // 32 * 32 + 16
    code = torch.randint(1, 255, q.shape, generator=generator)
    anywhere = torch.randint(0, 2**16, (2**16,), generator=generator)
    fraction = torch.cat([2**16 - q[: 2**16], 2**16 - 1 - q[: 2**16], anywhere])
    scale = torch.stack([from_bits(torch.tensor(HIGH)), torch.tensor(2.0**23)])
    pattern = HIGH - 255 * 2**19 + (code << 19) + 8 * fraction
    x, scales = from_bits(pattern), scale.expand(q.numel(), 2)
    assert torch.equal(LOG.encode(x, scales, thresholds).long(), code + (fraction + q >= 2**16))
    assert torch.equal(LOG.encode(x, scales, None).long(), code + (fraction >= 2**15))


@pytest.mark.parametrize("fraction", [0.0, 2.0**-11, 0.25, 0.6180339, 0.999])
def test_encode_log_dithered_mean_is_the_exact_position(fraction):
    """Mean code over 1000 elements x 1000 steps, against the exact position.

    Independent thresholds would leave a standard deviation of sqrt(f(1-f)/n) <= 1/(2 sqrt(n)).
    Thresholds are 32 i + 16 for i < 2^11 in a cell of 65536, so the probability of rounding up is
    within 16/65536 of the fraction.  The position is within 1.5/65536, as above.
    """
    scale = log_scale(8.3)
    pattern = bits(scale[:1]) - round((255 - 100 - fraction) * float(scale[1]) / 16)
    grid = BlockGrid(1, 1000, 256)
    total = 0
    for start in range(1, 1001, 100):
        phases = (dither.phase_of(77, step) for step in range(start, start + 100))
        thresholds = torch.cat([dither.in_blocks(phase, 0, 1000, grid) for phase in phases])
        x = from_bits(pattern).expand(thresholds.numel())
        codes = LOG.encode(x, scale.expand(thresholds.numel(), 2), thresholds)
        total += int(codes.sum(dtype=torch.int64))
    exact = float(position(pattern, scale))
    assert abs(exact - 100 - fraction) < 1e-4
    assert abs(total / 1e6 - exact) <= 4 / (2 * 1000) + (16 + 1.5) / 65536
