# SPDX-License-Identifier: Apache-2.0
"""The codes of `log`, element by element."""

import pytest
import torch

from zero8.spec import arithmetic as ieee
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, quantize
from zero8.spec.log import LogCode

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ONE = 0x3F800000  # bits of 1.0


def from_bits(pattern: torch.Tensor) -> torch.Tensor:
    return pattern.to(torch.int32).view(torch.float32)


# --- Octaves, the levels of first moments ---------------------------------------------------------

SIGNED = CODECS["log"].of_signed
OCTAVES = {"narrow": SIGNED.narrow, "wide": SIGNED.wide}
TOPS = {"narrow": 14.75, "wide": 247.0}  # the largest levels
SIGNS = {"narrow": 1, "wide": -1}  # of the scale
PRODUCED = torch.arange(-127, 128)
both_sets = pytest.mark.parametrize("name", OCTAVES)


def as_codes(integers: torch.Tensor) -> torch.Tensor:
    return (integers & 255).to(torch.uint8)


def as_integers(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.int8).to(torch.int64)


@both_sets
def test_octaves_scale_of_every_mantissa_is_a_fixpoint(name):
    """A block's extreme decodes to scale * top, which has to give the same scale again, (C4).

    Exhaustive over the 2^23 mantissas of one octave; other octaves differ by an exact factor.
    """
    octaves, top = OCTAVES[name], TOPS[name]
    for start in range(0, 2**23, 2**20):
        absmax = from_bits(torch.arange(ONE + start, ONE + start + 2**20))
        scale = absmax / top
        assert torch.equal(scale * top / top, scale)
        # And a sample through the code itself.
        sample = slice(start % 64, None, 256)
        assert torch.equal(octaves.scales(absmax[sample]), scale[sample])
        assert torch.equal(octaves.scales(scale[sample] * top), scale[sample])


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
FIRST_STEP, LAST_STEP = ((16 * span + 127) // 254 for span in (LOG.MIN_SPAN, LOG.MAX_SPAN))
EXTREMES = {"lowest": 0, "highest": 0xFFFF}
HIGH = 0x7F000000  # bits of a large number, so that all spans end at normal floats


def scales_of(steps: torch.Tensor) -> torch.Tensor:
    return torch.stack([from_bits(torch.full_like(steps, HIGH)), steps.float()], 1)


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
