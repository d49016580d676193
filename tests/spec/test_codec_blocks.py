# SPDX-License-Identifier: Apache-2.0
"""What quantize and dequantize promise about whole blocks, for all six moment codes."""

import pytest
import torch
from adaptive_samples import near_joint
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zero8.spec import arithmetic as ieee
from zero8.spec import dither
from zero8.spec.codec import CODECS, AdaptiveCode, DynamicCode, LogCode, dequantize, quantize
from zero8.spec.scalars import StepScalars

pytestmark = pytest.mark.usefixtures("one_torch_thread")
UNIT = 2.0**-24  # largest relative error of one rounding
TINY = 2.0**-126  # smallest normal number
CODES = {
    f"{name} {which}": getattr(codec, which)
    for name, codec in CODECS.items()
    for which in ("exp_avg", "exp_avg_sq")
}
every_code = pytest.mark.parametrize("code", CODES.values(), ids=CODES)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def dithers(numel: int) -> dict[str, torch.Tensor | None]:
    """Nearest, the two extreme thresholds, and ordinary ones."""
    return {
        "nearest": None,
        "lowest": torch.zeros(numel, dtype=torch.int64),
        "highest": torch.full((numel,), 0xFFFFFFFF),
        "ordinary": dither.dithered(0x2468ACE0, 11, numel),
    }


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
    "below the smallest scale of sqrt(v)": [2.0**-117, 2.0**-108, 2.0**-125],
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
@settings(max_examples=60)
def test_quantize_any_block_is_idempotent(code, values):
    x = input_for(code, torch.tensor(values, dtype=torch.float32))
    assert_fixed(code, x, blocks_of(x.numel(), 1), 1)


@every_code
def test_quantize_many_magnitudes_are_idempotent(code):
    """Blocks of 64 from 1e-38 to 1e38, their elements over up to 60 octaves."""
    x = torch.cat([spread(code, 64 * 50, octaves, seed=octaves) for octaves in (1, 8, 20, 60)])
    factor = torch.exp2(torch.linspace(-126, 126, 200).double()).repeat_interleave(64)
    x = (x.double() * factor).clamp(-3e38, 3e38).float()
    assert_fixed(code, x, blocks_of(64, 200), 200)


@every_code
def test_quantize_every_code_under_many_scales_is_idempotent(code):
    """All 256 codes in each of 256 blocks, under scales that quantize makes of random numbers."""
    _, scales = quantize(code, spread(code, 256 * 8, 40, seed=3, zeros=0), blocks_of(8, 256), 256)
    codes = torch.arange(256, dtype=torch.uint8)
    if code.signed and code.zero_code == 0:
        codes = codes[codes != 128]  # minus zero is never produced
    block, codes = blocks_of(codes.numel(), 256), codes.repeat(256)
    decoded = dequantize(code, codes, scales, block)
    for name, thresholds in dithers(decoded.numel()).items():
        codes2, scales2 = quantize(code, decoded, block, 256, thresholds)
        assert torch.equal(bits(scales2), bits(scales)), name
        assert torch.equal(codes2, codes), name


def test_quantize_log_blocks_at_the_smallest_root_are_idempotent():
    """Lowest roots within 40 ulps of 2^-63, below which nothing may decode; any span above."""
    code, num_blocks = LogCode(), 20_000
    generator = torch.Generator().manual_seed(8)
    low = ((127 - 63) << 23) + torch.randint(0, 40, (num_blocks,), generator=generator)
    high = low + torch.randint(0, 15 << 23, (num_blocks,), generator=generator)
    roots = torch.stack([low, high], dim=1).to(torch.int32).view(torch.float32).flatten()
    assert_fixed(code, ieee.mul(roots, roots), blocks_of(2, num_blocks), num_blocks)


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9, 0.99, 0.9999, 1 - 1e-9])
@pytest.mark.parametrize("numel", [5, 64, 255])
def test_quantize_adaptive_blocks_choose_the_same_code_again(numel, beta1):
    """Whether they come from steps, which settle, or were written; with any largest element."""
    code, blocks = CODECS["log"].exp_avg, 4000
    scalars = StepScalars.at(
        1, 1.0, lr=1.0, betas=(beta1, 0.9), eps=1e-8, weight_decay=0.0, decoupled=True
    )
    largest = torch.exp2(torch.rand(blocks, generator=torch.Generator().manual_seed(4)))
    x, block = near_joint(largest, numel, seed=numel), blocks_of(numel, blocks)
    for settling in (None, scalars.settling):
        codes, scales = quantize(code, x, block, blocks, None, settling)
        assert 0.2 < (scales < 0).float().mean() < 0.8
        codes2, scales2 = quantize(code, dequantize(code, codes, scales, block), block, blocks)
        assert torch.equal(scales2, scales) and torch.equal(codes2, codes)


def test_quantize_adaptive_blocks_at_the_smallest_wide_scale_are_idempotent():
    """Largest elements within 2000 ulps of where the narrow scale is 2^-100."""
    code, blocks = CODECS["log"].exp_avg, 4000
    limit = torch.tensor(14.75 * 2.0**-100).view(torch.int32)
    largest = (limit + torch.arange(-blocks // 2, blocks // 2)).int().view(torch.float32)
    x = near_joint(largest, 5, seed=1)
    codes, scales = quantize(code, x, blocks_of(5, blocks), blocks)
    assert (scales[: blocks // 2] > 0).all() and (scales[blocks // 2 :] < 0).any()
    assert_fixed(code, x, blocks_of(5, blocks), blocks)


# --- Zero ----------------------------------------------------------------------------------------


@every_code
def test_quantize_block_of_zeros_has_scale_zero_and_the_zero_code(code):
    """Subnormals are zeros; the neighbouring block is not touched."""
    x = torch.tensor([0.0, -0.0, 2.0**-149, 2.0**-127, 1.0, 0.0, 2.0, 3.0])
    codes, scales = quantize(code, x, blocks_of(4, 2), 2, dither.dithered(1, 0, 8))
    assert not scales[0].any() and (scales[1] > 0).all()
    assert codes[:4].tolist() == [code.zero_code] * 4
    assert codes[5] == code.zero_code
    assert dequantize(code, codes, scales, blocks_of(4, 2)).tolist()[:6:5] == [0.0, 0.0]


@every_code
def test_quantize_exact_zeros_decode_to_zero_and_second_moments_never_do(code):
    """Under any dither and any distance from the block's largest, and at the smallest scales."""
    x = torch.cat([spread(code, 64 * 60, 80, seed=1), spread(code, 64 * 4, 60, seed=2) * 1e-29])
    x = ieee.flush(x)
    block, num_blocks = blocks_of(64, 64), 64
    for name, thresholds in dithers(x.numel()).items():
        codes, scales = quantize(code, x, block, num_blocks, thresholds)
        decoded = dequantize(code, codes, scales, block)
        assert not decoded[x == 0].any(), name
        assert (codes[x == 0] == code.zero_code).all(), name
        if not code.signed:
            assert (decoded[x > 0] > 0).all(), name
            assert (codes[x > 0] != code.zero_code).all(), name


# --- Errors --------------------------------------------------------------------------------------


@every_code
def test_quantize_error_is_within_the_documented_bound(code):
    """With u = 2^-24, s a block's scale, x the moment (its root where roots are stored):

    companded  The code is read off y = 1 + |x|/s with three roundings, of 1/s, y and the decoded
               value, each relative to at most |x| + s, so the error is (c + 4u)(|x| + s), where a
               cell is 2^-mantissa_bits wide and c is half of it to nearest, all of it dithered.
    dynamic    Half of the largest gap, and three roundings relative to s: (gap/2 + 4u) s.
    log        On bit patterns: the position is within 5/65536 of a cell, and decoding rounds
               code * step <= 2^27.6 to a float (8 units) and to an integer (half a unit):
               (c + 5/65536) step + 8.5 units.
    """
    octaves = 10 if isinstance(code, LogCode) else 40  # log: no element is raised to the lowest
    x = spread(code, 256 * 40, octaves).clamp(-1e6, 1e6)
    x = torch.where(x.abs() < 1e-4, 0.0, x) if isinstance(code, LogCode) else x
    block = blocks_of(256, 40)
    for name, thresholds in dithers(x.numel()).items():
        if code.signed and thresholds is not None:
            continue  # a first moment is always rounded to nearest
        codes, scales = quantize(code, x, block, 40, thresholds)
        scale = scales[block].double()
        wanted = ieee.sqrt(x) if code.square_root else x
        got = code.decode(codes, scales[block], 1.0)
        cell = 0.5 if thresholds is None else 1.0
        if isinstance(code, LogCode):
            error = (bits(got) - bits(wanted)).abs()[x > 0].double()
            bound = ((cell + 5 / 65536) * scale[:, 1] + 8.5)[x > 0]
        else:
            error = (got.double() - wanted.double()).abs()
            if isinstance(code, DynamicCode):
                gap = float(code.levels.double().diff().max())
                bound = (gap / 2 + 4 * UNIT) * scale.abs()
            else:
                mantissa_bits = torch.tensor(float(getattr(code, "mantissa_bits", 0)))
                if isinstance(code, AdaptiveCode):
                    mantissa_bits = torch.where(scale < 0, 4.0, 5.0)
                if not code.signed and thresholds is None:
                    cell = torch.where(codes == 1, 1.0, 0.5)  # raised from 0
                relative = cell * torch.exp2(-mantissa_bits) + 4 * UNIT
                bound = relative * (wanted.double().abs() + scale.abs())
        assert (error <= bound).all(), name


def test_quantize_log_elements_far_below_are_raised_to_14_octaves():
    v = torch.tensor([1.0, 2.0**-26, 2.0**-40, 2.0**-126])
    codes, scales = quantize(LogCode(), v, blocks_of(4, 1), 1)
    assert codes.tolist()[1:] == [round(254 * 13 / 14), 254, 254]
    assert dequantize(LogCode(), codes, scales, blocks_of(4, 1)).tolist()[3] == 2.0**-28


# --- Blocks are independent, and scaling is exact ------------------------------------------------


@every_code
@pytest.mark.parametrize("factor", [1e6, -1e6, 0.0], ids=repr)
def test_quantize_one_outlier_changes_its_block_only(code, factor):
    x = spread(code, 256 * 5, 4, zeros=0)
    block, thresholds = blocks_of(256, 5), dither.dithered(3, 0, 256 * 5)
    changed = x.clone()
    changed[2 * 256 + 77] = input_for(code, torch.tensor(factor)) * x.abs().max()
    codes, scales = quantize(code, x, block, 5, thresholds)
    codes2, scales2 = quantize(code, changed, block, 5, thresholds)
    different = {int(b) for b in block[codes != codes2]}
    different |= {int(b) for b in (scales != scales2).nonzero()[:, 0]}
    assert different == {2}


@every_code
@pytest.mark.parametrize("power", [-40, -1, 1, 40])
def test_quantize_power_of_two_scaling_leaves_codes_identical(code, power):
    """g * 2^k makes m * 2^k and v * 4^k; no subnormal, smallest scale or saturation is near."""
    x, block = spread(code, 256 * 5, 12), blocks_of(256, 5)
    thresholds = None if code.signed else dither.dithered(9, 0, x.numel())
    codes, scales = quantize(code, x, block, 5, thresholds)
    factor = 2.0**power if code.signed else 4.0**power
    codes2, scales2 = quantize(code, x * factor, block, 5, thresholds)
    assert torch.equal(codes2, codes)
    if isinstance(code, LogCode):
        assert torch.equal(scales2, scales * torch.tensor([2.0**power, 1.0]))
    else:
        linear = isinstance(code, DynamicCode) or code.signed
        assert torch.equal(scales2, scales * (factor if linear else 2.0**power))
