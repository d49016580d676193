# SPDX-License-Identifier: Apache-2.0
"""What quantize and dequantize promise about whole blocks, for all moment codes."""

import pytest
import torch
from adaptive_samples import near_joint
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_codec import bits, dithers

from zero8.checkpoint.read.statistics import order_of_codes
from zero8.spec import arithmetic as ieee
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, dequantize, has_zero, quantize
from zero8.spec.fp8 import Fp8Code
from zero8.spec.levels import NearestEntry
from zero8.spec.log import LogCode, SignedLogCode

pytestmark = pytest.mark.usefixtures("one_torch_thread")
UNIT = 2.0**-24  # largest relative error of one rounding
TINY = 2.0**-126  # smallest normal number
CODES = {
    f"{name} {which}": codec.code_of(ADAM.moment(which))
    for name, codec in CODECS.items()
    for which in ("exp_avg", "exp_avg_sq")
}
SIGNED, LOG = CODECS["log"].of_signed, CODECS["log"].of_unsigned
every_code = pytest.mark.parametrize("code", CODES.values(), ids=CODES)


def blocks_of(length: int, num_blocks: int) -> torch.Tensor:
    return torch.arange(num_blocks).repeat_interleave(length)


def input_for(code, x: torch.Tensor) -> torch.Tensor:
    return x if code.signed else x.abs()


def spread(code, numel: int, octaves: float, seed: int = 0, zeros: float = 1 / 16) -> torch.Tensor:
    """Gaussian numbers (absolute for v) times powers of two from a range of octaves, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2((torch.rand(numel, generator=generator) - 0.5) * octaves)
    x = torch.randn(numel, generator=generator) * scale
    return input_for(code, torch.where(torch.rand(numel, generator=generator) < zeros, 0.0, x))


# --- Idempotence ---------------------------------------------------------------------------------


def assert_fixed(code, x: torch.Tensor, block: torch.Tensor, num_blocks: int) -> None:
    """Quantize x in each way, and what that decodes to in each way: nothing may change."""
    for first, thresholds in dithers(x.numel()).items():
        codes, scales = quantize(code, x, block, num_blocks, thresholds)
        decoded = dequantize(code, codes, scales, block)
        assert decoded.isfinite().all()
        for second, others in dithers(x.numel()).items():
            codes2, scales2 = quantize(code, decoded, block, num_blocks, others)
            assert torch.equal(bits(scales2), bits(scales)), f"{first}, then {second}"
            assert torch.equal(codes2, codes), f"{first}, then {second}"


ADVERSARIAL = {
    "largest is negative": [-3.0, 1.0, 2.9, -0.001],
    "plus and minus tie": [-2.5, 2.5, 0.7, -0.7],
    "minus and plus tie": [2.5, -2.5, 1.25],
    "one element": [0.3],
    "one negative element": [-1e-7],
    "all equal": [0.7] * 9,
    "a few ulps apart": [1 + k * 2.0**-23 for k in (0, 1, 2, 3, 50, 90, 1000)],
    "outlier of 1e6": [1e6, 1.0, -1.0, 1e-3, 3.0],
    "subnormals": [2.0**-149, -(2.0**-130), TINY - 2.0**-149],
    "smallest normal": [2.0**-127, TINY, -TINY],
    "smallest normals": [TINY, -1.3 * TINY, 1.7 * TINY],
    "smallest normals and one far above": [TINY * (1 + 2.0**-23), TINY, 1.0, -3.3],
    "below the smallest scale of m": [2.0**-123, -(2.0**-119), 2.0**-120],
    "raised to the first normal level": [2.0**-125, 0.0, TINY, 1.5 * TINY, 2**-125.5],
    **{
        f"over {octaves} octaves": [1.0, *(2.0**-octaves * (1 + k * UNIT) for k in (0, -1, 2))]
        for octaves in (28, 2)
    },
    "below the smallest dynamic scale": [-(2.0**-105), 2.0**-106, 1.0001 * 2.0**-105],
    "just below the smallest dynamic scale": [-(2.0**-104) * (1 - UNIT), 2.0**-106],
    "wide": [1e-38, 1e-30, -1e-20, 1e-10, 1.0, -1e10, 1e20, 1e30, 1e38],
    "beyond saturation": [3e38, -3.4e38, 2.0**126, 2.0**125, 1.0],
    "negative beyond saturation": [-3e38, 2.0**125, 1.0],
    "largest float": [(2 - 2.0**-23) * 2.0**127, 1.0],
    "zeros of both signs": [0.0, -0.0, 0.0],
    "zeros and one": [0.0, -0.0, 1.0],
}


@every_code
@pytest.mark.parametrize("values", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_quantize_adversarial_block_is_idempotent(code, values):
    x = input_for(code, torch.tensor(values))
    assert_fixed(code, x, blocks_of(x.numel(), 1), 1)


FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-(2.0**-120), 2.0**-120, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, TINY, 2.0**-149, 2.0**-104, 2.0**-58, 2.0**126]),
)


@every_code
@given(values=st.lists(FLOATS, min_size=1, max_size=40))
@example(values=[-1.0, 0.9999999])
@settings(max_examples=25)
def test_quantize_any_block_is_idempotent(code, values):
    x = input_for(code, torch.tensor(values, dtype=torch.float32))
    assert_fixed(code, x, blocks_of(x.numel(), 1), 1)


@every_code
def test_quantize_every_code_under_many_scales_is_idempotent(code):
    """All codes in each of 512 blocks, under scales that quantize makes of random numbers."""
    x = torch.cat([spread(code, 256 * 8, octaves, seed=3, zeros=0) for octaves in (4, 40)])
    _, scales = quantize(code, x, blocks_of(8, 512), 512)
    num_codes = 1 << code.bits
    codes = torch.arange(num_codes, dtype=torch.uint8).expand(512, -1)
    if isinstance(code, SignedLogCode):
        # In the order in which the sampled elements choose the block's levels again: of 64, those
        # at the joint or above are all where the largest come first, and 32 of the wide levels
        # where the smallest do.  -128, or -32, is never produced.
        signed = torch.arange(1 - num_codes // 2, num_codes // 2)
        magnitudes = signed.abs()
        rising = magnitudes.argsort(stable=True)
        order = torch.where((scales < 0)[:, None], rising, rising.flip(0))
        codes = (signed & num_codes - 1).to(torch.uint8)[order]
        assert 100 < (scales < 0).sum() < 412
    if isinstance(code, Fp8Code):
        codes = order_of_codes(code).to(torch.uint8).expand(512, -1)
    block, codes = blocks_of(codes.shape[1], 512), codes.flatten()
    decoded = dequantize(code, codes, scales, block)
    for name, thresholds in dithers(decoded.numel()).items():
        codes2, scales2 = quantize(code, decoded, block, 512, thresholds)
        assert torch.equal(bits(scales2), bits(scales)), name
        assert torch.equal(codes2, codes), name


@pytest.mark.parametrize("octaves", [2, 30], ids="largest {} octaves above at most".format)
def test_quantize_log_blocks_at_the_smallest_normal_floats_are_idempotent(octaves):
    """Lowest elements within 40 units of 2^-126, below which nothing may decode; any span above.

    Of 9 elements the second and third are 0, and the others are anywhere between.
    """
    num_blocks, numel = 10_000, 9
    generator = torch.Generator().manual_seed(8)
    low = 0x00800000 + torch.randint(0, 40, (num_blocks, 1), generator=generator)
    span = torch.randint(0, octaves << 23, (num_blocks, 1), generator=generator)
    span[:500] %= 64
    between = torch.rand((num_blocks, numel - 4), generator=generator, dtype=torch.float64)
    zeros = torch.zeros((num_blocks, 2), dtype=torch.int64)
    pattern = torch.cat([low, zeros, low + span, low + (between * (span + 1)).long()], dim=1)
    x, block = pattern.to(torch.int32).view(torch.float32).flatten(), blocks_of(numel, num_blocks)
    assert_fixed(LOG, x, block, num_blocks)
    span = (low + span - low.clamp(min=0x00800010)).clamp(2 << 23, 28 << 23)
    for name, thresholds in dithers(x.numel()).items():
        codes, scales = quantize(LOG, x, block, num_blocks, thresholds)
        assert torch.equal(scales[:, 1:].long(), (16 * span + 127) // 254), name
        decoded = dequantize(LOG, codes, scales, block)
        assert torch.equal(codes == 0, x == 0), name
        assert torch.equal(decoded >= TINY, x > 0) and not decoded[x == 0].any(), name


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9, 0.99, 0.9999, 1 - 1e-9])
@pytest.mark.parametrize("numel", [5, 64, 160, 255])
def test_quantize_signed_log_blocks_choose_the_same_levels_again(numel, beta1):
    """Whether they come from steps, which settle, or were written; with any largest element."""
    code, blocks = SIGNED, 1000
    scalars = ADAM.scalars(1, (1.0,), {**ADAM.options, "betas": (beta1, 0.9)}, True)
    largest = torch.exp2(torch.rand(blocks, generator=torch.Generator().manual_seed(4)))
    x, block = near_joint(largest, numel, seed=numel), blocks_of(numel, blocks)
    thresholds = dithers(x.numel())["ordinary"]
    for settling in (None, scalars.settling):
        codes, scales = quantize(code, x, block, blocks, thresholds, settling)
        assert 0.2 < (scales < 0).float().mean() < 0.8
        codes2, scales2 = quantize(code, dequantize(code, codes, scales, block), block, blocks)
        assert torch.equal(scales2, scales) and torch.equal(codes2, codes)


@pytest.mark.parametrize("numel", [5, 64, 255])
@pytest.mark.parametrize("code", [SIGNED, CODECS["log6"].of_signed], ids=["log", "log6"])
def test_quantize_signed_log_blocks_of_dithered_steps_are_written_as_they_are(code, numel):
    """Though the dither has moved values over the joint, so that (C9) would choose other levels."""
    blocks, settling = 500, 1.01
    largest = torch.exp2(torch.rand(blocks, generator=torch.Generator().manual_seed(4)))
    x, block = near_joint(largest, numel, seed=numel), blocks_of(numel, blocks)
    crossed = 0
    for name, thresholds in dithers(x.numel()).items():
        codes, scales = quantize(code, x, block, blocks, thresholds, settling)
        decoded = dequantize(code, codes, scales, block)
        codes2, scales2 = quantize(code, decoded, block, blocks)
        assert torch.equal(codes2, codes) and torch.equal(scales2, scales), name
        crossed += int((code.scales(decoded, block, blocks) != scales).sum())
    assert crossed > 0


# --- Zero ----------------------------------------------------------------------------------------


@every_code
def test_quantize_block_of_zeros_has_scale_zero_and_the_zero_code(code):
    """Subnormals are zeros; the neighbouring block is not touched."""
    x = torch.tensor([0.0, -0.0, 2.0**-149, 2.0**-127, 1.0, 0.0, 2.0, 3.0])
    codes, scales = quantize(code, x, blocks_of(4, 2), 2, dithers(8)["ordinary"])
    assert not scales[0].any() and (scales[1] > 0).all()
    assert codes[:4].tolist() == [code.zero_code] * 4
    assert codes[5] == code.zero_code
    zero = 0.0 if has_zero(code) else 3 / 16
    assert dequantize(code, codes, scales, blocks_of(4, 2)).tolist()[:6:5] == [0.0, zero]


@every_code
def test_quantize_exact_zeros_decode_to_zero_and_second_moments_never_do(code):
    """Under any dither and any distance from the block's largest, and at the smallest scales."""
    x = torch.cat([spread(code, 64 * 60, 80, seed=1), spread(code, 64 * 4, 60, seed=2) * 1e-29])
    x = ieee.flush(x)
    block, num_blocks = blocks_of(64, 64), 64
    for name, thresholds in dithers(x.numel()).items():
        codes, scales = quantize(code, x, block, num_blocks, thresholds)
        decoded = dequantize(code, codes, scales, block)
        assert not has_zero(code) or not decoded[x == 0].any(), name
        assert (codes[x == 0] == code.zero_code).all(), name
        if not code.signed and not has_zero(code):
            assert (decoded[scales[block] != 0] > 0).all(), name
        elif not code.signed:
            assert (decoded[x > 0] > 0).all(), name
            assert (codes[x > 0] != code.zero_code).all(), name


# --- Errors --------------------------------------------------------------------------------------


@every_code
def test_quantize_error_is_within_the_documented_bound(code):
    """With u = 2^-24, s a block's scale and x the moment:

    log      m  The code is read off y = 1 + |x|/s with three roundings, of 1/s, y and the decoded
                value, each relative to at most |x| + s, so the error is (1/2 cell + 4u)(|x| + s),
                where a cell is 2^-5, or 2^-4 among wide levels; with 6 bits 2^-3 or 2^-2.
    dynamic     Half of the largest gap, and three roundings relative to s: (gap/2 + 4u) s.
    linear4     The same, but v below the first level is raised to it: (1/16 + 4u) s.
    log      v  On bit patterns: the position is within 1.5/65536 of a cell, which is less than
                what thresholds stay clear of its ends, and a level is rounded down to a unit:
                (1/2 + 1.5/65536) step/parts + 1 to nearest, step/parts + 1 dithered.
    fp8         Half a cell is at most 2^-4 |x|, or 2^-10 s among multiples of 2^-9 s; a v rounded
                up to code 1 is within 2^-9 s.  Three roundings, of 1/s, x/s and the decoded value,
                which is exact here: 4u |x| more.
    """
    # log: no second moment is raised to 28 octaves below the largest.
    octaves = 20 if isinstance(code, LogCode) else 40
    x = spread(code, 256 * 40, octaves).clamp(-1e6, 1e6)
    x = torch.where(x.abs() < 2e-2, 0.0, x) if isinstance(code, LogCode) else x
    block = blocks_of(256, 40)
    for name, thresholds in dithers(x.numel()).items():
        codes, scales = quantize(code, x, block, 40, thresholds)
        scale = scales[block].double()
        got = dequantize(code, codes, scales, block)
        if isinstance(code, LogCode):
            error = (bits(got) - bits(x)).abs()[x > 0].double()
            cell = 0.5 + 1.5 / 65536 if thresholds is None else 1.0
            bound = (cell * scale[:, 1] / 2**code.part_bits + 1)[x > 0]
        else:
            error = (got.double() - x.double()).abs()
            if isinstance(code, NearestEntry):
                half_gap = float(code.entries.double().diff().max()) / 2
                most = half_gap if has_zero(code) else float(code.entries[0])
                bound = (most + 4 * UNIT) * scale.abs()
            elif isinstance(code, Fp8Code):
                magnitude = x.double().abs()
                least = (2.0**-10 if code.signed else 2.0**-9) * scale
                bound = torch.maximum(2.0**-4 * magnitude, least) + 4 * UNIT * magnitude
            else:
                cell = torch.where(scale < 0, 2.0 ** (4 - code.bits), 2.0 ** (3 - code.bits))
                bound = (cell / 2 + 4 * UNIT) * (x.double().abs() + scale.abs())
        assert (error <= bound).all(), name
