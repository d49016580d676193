# SPDX-License-Identifier: Apache-2.0
"""The six moment codes, element by element; tests/spec/test_codec_blocks.py has whole blocks."""

import hashlib
from fractions import Fraction

import pytest
import torch

from zero8.spec import arithmetic as ieee
from zero8.spec import dither
from zero8.spec.codec import CODECS, LogCode, codec_named, codec_numbered

pytestmark = pytest.mark.usefixtures("one_torch_thread")
DYNAMIC = {which: getattr(CODECS["dynamic"], which) for which in ("exp_avg", "exp_avg_sq")}
COMPANDED = {
    "companded exp_avg": CODECS["companded"].exp_avg,
    "companded exp_avg_sq": CODECS["companded"].exp_avg_sq,
    "log exp_avg, narrow": CODECS["log"].exp_avg.narrow,
}
TOPS = dict(zip(COMPANDED, (247.0, 251.0, 14.75), strict=True))
LEVELS = dict(zip(COMPANDED, ((8, 16), (8, 32), (4, 32)), strict=True))
every_companded = pytest.mark.parametrize("name", COMPANDED)
HALF = 0x3F800000  # bits of 1.0


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32).to(torch.int64)


def dithers(numel: int) -> dict[str, torch.Tensor | None]:
    """Nearest, the two extreme thresholds, and ordinary ones."""
    return {
        "nearest": None,
        "lowest": torch.zeros(numel, dtype=torch.int64),
        "highest": torch.full((numel,), 0xFFFFFFFF),
        "ordinary": dither.dithered(0x2468ACE0, 11, numel),
    }


def test_codec_names_and_numbers_are_stable():
    """Files carry the numbers."""
    assert {name: codec.number for name, codec in CODECS.items()} == {
        "dynamic": 1,
        "companded": 2,
        "log": 3,
    }
    assert all(codec_numbered(c.number) is codec_named(c.name) is c for c in CODECS.values())


def test_codec_unknown_name_or_number_raises():
    with pytest.raises(ValueError, match="got 'fp4', expected one of .*'companded', 'dynamic'"):
        codec_named("fp4")
    with pytest.raises(ValueError, match="codec number 9 is unknown .*dynamic"):
        codec_numbered(9)


# --- The dynamic maps ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "digest"),
    [
        ("exp_avg", "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c"),
        ("exp_avg_sq", "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398"),
    ],
)
def test_dynamic_map_equals_that_of_bitsandbytes(which, digest):
    """The digests are of bitsandbytes 0.50.2's `create_dynamic_map`, as float32."""
    levels = DYNAMIC[which].levels
    assert levels.dtype == torch.float32 and levels.shape == (256,)
    assert hashlib.sha256(levels.numpy().tobytes()).hexdigest() == digest


@pytest.mark.parametrize(("which", "gap"), [("exp_avg", 0.0141), ("exp_avg_sq", 0.0070)])
def test_dynamic_gaps_are_as_documented(which, gap):
    assert round(float(DYNAMIC[which].levels.diff().max()), 4) == gap


@pytest.mark.parametrize("which", DYNAMIC)
def test_encode_dynamic_at_every_boundary_is_nearest(which):
    """Two floats on either side of every entry and of the middle of any two; the middle goes up.

    With scale 1 the normalized value is x itself.  Distances between float32 numbers on a common
    grid of 2^-46 and below 2 are exact in binary64, so the brute-force search sees no rounding.
    """
    code = DYNAMIC[which]
    wide = code.levels.double()
    x = torch.cat([((wide[:-1] + wide[1:]) / 2).float(), code.levels])
    for _ in range(2):
        x = torch.cat([x, x.nextafter(torch.tensor(2.0)), x.nextafter(torch.tensor(-2.0))])
    x = x[x >= 0].unique() if which == "exp_avg_sq" else x.unique()
    x = ieee.flush(x)
    distance = (x.double()[:, None] - wide).abs()
    nearest = 255 - distance.flip(1).argmin(1)  # the last of equals
    if which == "exp_avg_sq":
        nearest = torch.where((x > 0) & (nearest == 0), 1, nearest)
    assert x.numel() >= 255 * 5
    assert torch.equal(code.encode(x, torch.ones(x.numel()), None).long(), nearest)


@pytest.mark.parametrize("which", DYNAMIC)
@pytest.mark.parametrize("scale", [1.0, -1.0, 3.7e-20, -0.1, 2.0**126, 2.0**-104], ids=repr)
def test_encode_dynamic_all_codes_return_what_was_decoded(which, scale):
    code, codes = DYNAMIC[which], torch.arange(256, dtype=torch.uint8)
    scales = torch.full((256,), scale if which == "exp_avg" else abs(scale))
    x = code.decode(codes, scales, 1.0)
    assert torch.equal(x, (code.levels.double() * scales.double()).float())
    assert torch.equal(code.encode(x, scales, None), codes)


# --- Companded codes -----------------------------------------------------------------------------


@every_companded
def test_companded_levels_are_octaves_above_one(name):
    code, (octaves, per_octave) = COMPANDED[name], LEVELS[name]
    levels = [
        (1 + Fraction(i, per_octave)) * 2**octave - 1
        for octave in range(octaves)
        for i in range(per_octave)
    ]
    levels += [-level for level in levels] if code.signed else []
    assert code.levels.tolist() == [float(level) for level in levels]
    assert code.top == TOPS[name]


@every_companded
@pytest.mark.parametrize("scale", [1.0, 3.7e-20, 0.1, 5.5e15], ids=repr)
def test_encode_companded_all_codes_return_what_was_decoded(name, scale):
    code, codes = COMPANDED[name], torch.arange(256, dtype=torch.uint8)
    if code.signed:
        codes = codes[codes != 128]  # minus zero is never produced
    scales = torch.full((codes.numel(),), scale)
    x = code.decode(codes, scales, 1.0)
    assert torch.equal(x, (code.levels[codes.long()].double() * scales.double()).float())
    for dithering, thresholds in dithers(codes.numel()).items():
        assert torch.equal(code.encode(x, scales, thresholds), codes), dithering


@every_companded
def test_encode_companded_at_every_boundary_is_nearest(name):
    """Two floats on either side of every level and of the middle of any two; the middle goes up.

    With scale 1, y = 1 + |x| is exact for the x = y - 1 chosen here, and the nearest level to y
    is searched in binary64, where all differences are exact.
    """
    code = COMPANDED[name]
    targets = 1 + code.levels[: code.max_code + 1].double()
    y = torch.cat([((targets[:-1] + targets[1:]) / 2), targets]).float()
    for _ in range(2):
        y = torch.cat([y, y.nextafter(torch.tensor(300.0)), y.nextafter(torch.tensor(0.0))])
    y = torch.cat([y, torch.tensor([260.0, 1e5])]).clamp(min=1.0).unique()
    x = y - 1
    assert torch.equal(1 + x.double(), y.double())
    distance = (y.double()[:, None] - targets).abs()
    nearest = code.max_code - distance.flip(1).argmin(1)  # the last of equals
    ones = torch.ones(x.numel())
    if code.signed:
        assert torch.equal(code.encode(x, ones, None).long(), nearest)
        nearest = torch.where(nearest > 0, nearest + 128, 0)
        assert torch.equal(code.encode(-x, ones, None).long(), nearest)
    else:
        nearest = torch.where((x > 0) & (nearest == 0), 1, nearest)
        assert torch.equal(code.encode(x, ones, None).long(), nearest)


@every_companded
def test_companded_scale_of_every_mantissa_is_a_fixpoint(name):
    """A block's extreme decodes to scale * top, which has to give the same scale again, (C4).

    Exhaustive over the 2^23 mantissas of one octave; other octaves differ by an exact factor.
    """
    code, top = COMPANDED[name], TOPS[name]
    for start in range(0, 2**23, 2**20):
        k = torch.arange(HALF + start, HALF + start + 2**20, dtype=torch.int32).view(torch.float32)
        scale = k / top
        assert torch.equal(scale * top / top, scale)
        # And a sample through the code itself.
        block = torch.arange(4096)
        scales = code.scales(k[start % 64 :: 256][:4096], block, 4096)
        assert torch.equal(scales, scale[start % 64 :: 256][:4096])
        assert torch.equal(code.scales(scales * top, block, 4096), scales)


@every_companded
def test_companded_decoded_values_stay_within_5_ulps_of_their_code(name):
    """The promise that keeps thresholds, 8 units clear of a cell's ends, from moving codes."""
    code, generator = COMPANDED[name], torch.Generator().manual_seed(6)
    extreme = 1 + torch.randint(0, 2**23, (1024,), generator=generator) * 2.0**-23
    scales = code.scales(extreme, torch.arange(1024), 1024)
    levels = code.levels[: code.max_code + 1].repeat(1024)
    scale = scales.repeat_interleave(code.max_code + 1)
    x = ieee.mul(levels, scale)
    if code.square_root:
        x = ieee.sqrt(ieee.mul(x, x))
    y = ieee.fma(x, ieee.div(1.0, scale), 1.0)
    assert (bits(y) - bits(1 + levels)).abs().max() <= 5


@pytest.mark.parametrize("fraction", [0.0, 2.0**-12, 0.25, 0.6180339, 0.999])
@pytest.mark.parametrize("cell", [3, 100, 200])
def test_encode_companded_dithered_mean_is_the_exact_position(cell, fraction):
    """Mean code over 1000 elements x 1000 steps, in cells, against the position of y.

    Independent thresholds would leave a standard deviation of sqrt(f(1-f)/n) <= 1/(2 sqrt(n)).
    Thresholds are 16 i + 8 for i < 2^14 in a cell of 2^18 units, so the probability of rounding
    up is within 8/2^18 of the fraction.
    """
    position = (cell << 18) + round(fraction * 2**18)
    x = torch.tensor(HALF + position, dtype=torch.int32).view(torch.float32) - 1
    exact = float(bits(1 + x) - HALF) / 2**18
    mean = mean_code(COMPANDED["companded exp_avg_sq"], x, torch.tensor(1.0))
    assert abs(mean - exact) <= 4 / (2 * 1000) + 8 / 2**18


@pytest.mark.parametrize("beta1", [0.5, 0.8, 0.9, 0.95, 0.99, 0.9999])
@pytest.mark.parametrize(("name", "scale"), [("companded", 1.0), ("log", 1.0), ("log", -1.0)])
def test_encode_decaying_first_moment_reaches_zero(name, scale, beta1):
    """Every code, of either sign, in a block whose largest element stays where it is."""
    code = CODECS[name].exp_avg
    codes = torch.tensor([c for c in range(256) if c & 127], dtype=torch.uint8)
    scale = torch.full((codes.numel(),), scale)
    settling = 1 + 0.97 * min(1, 1 / beta1 - 1)
    decayed = code.encode(code.decode(codes, scale, beta1), scale, None, settling)
    assert ((decayed & 127) < (codes & 127)).all()
    assert ((decayed & 128 == codes & 128) | (decayed == 0)).all()
    # To nearest, the smallest codes stay.
    held = code.encode(code.decode(codes, scale, beta1), scale, None)
    assert (held == codes).any()


def mean_code(code, x: torch.Tensor, scale: torch.Tensor) -> float:
    """Mean of the codes of x over 1000 elements and 1000 steps."""
    elements = x.expand(1000), scale.expand(1000, *scale.shape)
    total = 0
    for step in range(1, 1001):
        thresholds = dither.dithered(dither.phase_of(77, step), 0, 1000)
        total += int(code.encode(*elements, thresholds).sum(dtype=torch.int64))
    return total / 1e6


# --- The code that is narrow or wide -------------------------------------------------------------

ADAPTIVE = CODECS["log"].exp_avg
# The largest element 1, so that the joint is 0.75/14.75 of it.
JOINT = float(ieee.mul(0.75, ieee.div(torch.tensor(1.0), 14.75)))


@pytest.mark.parametrize("numel", [1, 2, 3, 4, 5, 63, 64, 256])
def test_adaptive_code_is_wide_where_fewer_than_11_of_16_are_large(numel):
    """Blocks that hold every possible number of elements just at the joint, the others below."""
    below = float(torch.tensor(JOINT).nextafter(torch.tensor(0.0)))
    for large in range(1, numel + 1):
        x = torch.full((numel,), -below)
        x[:large] = JOINT
        x[0] = 1.0
        scale = ADAPTIVE.scales(x, torch.zeros(numel, dtype=torch.int64), 1)
        assert bool(scale < 0) == (large < 11 * numel / 16), large


def test_adaptive_code_decodes_and_encodes_as_the_code_that_was_chosen():
    codes = torch.tensor([c for c in range(256) if c != 128], dtype=torch.uint8)
    for code, scale in ((ADAPTIVE.narrow, 0.37), (ADAPTIVE.wide, -0.37)):
        x = code.decode(codes, torch.full((255,), 0.37), 0.9)
        assert torch.equal(ADAPTIVE.decode(codes, torch.full((255,), scale), 0.9), x)
        expected = code.encode(x, torch.full((255,), 0.37), None, 1.1)
        assert torch.equal(ADAPTIVE.encode(x, torch.full((255,), scale), None, 1.1), expected)


def test_adaptive_joint_in_the_wide_code_is_in_the_lower_half_of_a_cell():
    """Nothing below the joint may round up to it or above, whatever the block's largest element."""
    k = torch.linspace(1, 2, 10_001).clamp(max=2 - 2.0**-23)
    blocks = torch.arange(k.numel())
    joint = ieee.mul(0.75, ADAPTIVE.narrow.scales(k, blocks, k.numel()))
    scale = ADAPTIVE.wide.scales(k, blocks, k.numel())
    rounded = ADAPTIVE.wide.decode(ADAPTIVE.wide.encode(joint, scale, None), scale, 1.0)
    assert (rounded < joint).all()
    assert torch.equal(rounded, ieee.mul(12.5, scale))


# --- The logarithmic code ------------------------------------------------------------------------

SPANS = {"one octave": 1.0, "8.3 octaves": 8.3, "14 octaves": 14.0}


def log_scale(octaves: float, high: float = 1.7) -> torch.Tensor:
    """Scales of a block with the given largest root and span."""
    x = torch.tensor([high, high * 2**-octaves])
    return LogCode().scales(x, torch.zeros(2, dtype=torch.int64), 1)[0]


@pytest.mark.parametrize("octaves", SPANS.values(), ids=SPANS)
def test_encode_log_all_codes_return_what_was_decoded(octaves):
    code, codes = LogCode(), torch.arange(256, dtype=torch.uint8)
    scale = log_scale(octaves).expand(256, 2)
    x = code.decode(codes, scale, 1.0)
    assert x[0] == scale[0, 0] and x[255] == 0.0
    assert (x[:254] > x[1:255]).all()
    for dithering, thresholds in dithers(256).items():
        assert torch.equal(code.encode(x, scale, thresholds), codes), dithering


@pytest.mark.parametrize("octaves", SPANS.values(), ids=SPANS)
def test_encode_log_any_element_is_within_half_a_cell(octaves):
    """Half a cell when rounded to nearest, one when dithered, by brute force on bit patterns.

    The exact position is (bits(high) - bits(x))/step.  Its float32 value, 2^24 at most, is off by
    three roundings, and truncated: less than 5 units of 1/65536.
    """
    code, scale = LogCode(), log_scale(octaves)
    lowest = int(bits(scale[0])) - round(254 * float(scale[1]))
    pattern = torch.linspace(lowest, int(bits(scale[0])), 20_000, dtype=torch.float64).int()
    x = pattern.view(torch.float32)
    exact = (bits(scale[0]) - bits(x)).double() / scale[1].double()
    for dithering, thresholds in dithers(x.numel()).items():
        codes = code.encode(x, scale.expand(x.numel(), 2), thresholds)
        bound = 0.5 if dithering == "nearest" else 1.0
        assert (codes.double() - exact).abs().max() <= bound + 5 / 65536, dithering


def test_log_step_of_every_span_is_a_fixpoint():
    """A block's smallest decodes to a span of round(254 step), which gives the step again, (C8).

    Exhaustive over the float32 values of spans from 1 to 14 octaves, 2^23 to 14 * 2^23 units.
    """
    low, high = (int(torch.tensor(x * 2.0**23).view(torch.int32)) for x in (1.0, 14.0))
    for start in range(low, high + 1, 2**22):
        span = torch.arange(start, min(start + 2**22, high + 1), dtype=torch.int32)
        span = span.view(torch.float32)
        step = span / 254.0
        assert torch.equal((step * 254.0).round() / 254.0, step)
        # And a sample through the code itself: two roots with that span.
        sample = span[:: 2**14].int()
        block = torch.arange(sample.numel()).repeat_interleave(2)
        for distance in (sample, (step[:: 2**14] * 254.0).round().int()):
            roots = torch.stack([torch.full_like(sample, 0x60000000), 0x60000000 - distance], 1)
            scales = LogCode().scales(roots.view(torch.float32).flatten(), block, sample.numel())
            assert torch.equal(scales[:, 1], step[:: 2**14])


@pytest.mark.parametrize("fraction", [0.0, 2.0**-11, 0.25, 0.6180339, 0.999])
def test_encode_log_dithered_mean_is_the_exact_position(fraction):
    """As for the companded code; thresholds are 32 i + 16 for i < 2^11 in a cell of 65536 units.

    The position is within 5 units, as above.
    """
    scale = log_scale(8.3)
    offset = round((100 + fraction) * float(scale[1]))
    x = (bits(scale[0]) - offset).to(torch.int32).view(torch.float32)
    exact = offset / float(scale[1])
    assert abs(mean_code(LogCode(), x, scale) - exact) <= 4 / (2 * 1000) + (16 + 5) / 65536
