# SPDX-License-Identifier: Apache-2.0
"""INT8 rows: equations (W1) to (W3)."""

import pytest
import torch

from zero8.spec import dither
from zero8.spec.grid import BlockGrid
from zero8.spec.int8_rows import LARGEST_CODE, decoded, encoded, new_scales, thresholds
from zero8.spec.segment import Rounding

CPU = torch.device("cpu")
DTYPES = {"float32": (torch.float32, 16), "bfloat16": (torch.bfloat16, 8)}
SOME_THRESHOLDS = (0, 1, 12345, 32767, 32768, 65534, 65535)


def every_code() -> torch.Tensor:
    return torch.arange(-LARGEST_CODE, LARGEST_CODE + 1, dtype=torch.int8)


def scales_for(weights: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the scales of rows that had none."""
    return new_scales(weights, torch.zeros(len(weights), dtype=dtype))


def scales_of(bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return every mantissa of so many bits in one octave, and some at the ends of the range."""
    mantissas = torch.arange(1 << bits - 1, 1 << bits, dtype=torch.float32)
    octaves = torch.cat([mantissas * 2.0**-20, mantissas[:7] * 2.0**-100, mantissas[:7] * 2.0**90])
    return torch.cat([octaves, torch.tensor([2.0**-126])]).to(dtype)


@pytest.mark.parametrize(("dtype", "bits"), DTYPES.values(), ids=DTYPES)
def test_rows_with_every_scale_and_every_code_are_decoded_exactly_and_encode_to_themselves(
    dtype, bits
):
    scales = scales_of(bits, dtype)
    codes = every_code().expand(len(scales), -1)
    weights = decoded(codes, scales)
    assert torch.equal(weights.double(), codes.double() * scales.double().unsqueeze(1))
    assert torch.equal(scales_for(weights, dtype), scales)
    for largest in (126, 127):  # such rows keep theirs
        limit = largest * scales[:, None].float()
        assert torch.equal(new_scales(weights.clamp(-limit, limit), scales), scales)
    for threshold in SOME_THRESHOLDS:
        of_all = torch.full(codes.shape, threshold, dtype=torch.int32)
        assert torch.equal(encoded(weights, scales, of_all), codes)
    assert torch.equal(encoded(weights, scales, None), codes)


@pytest.mark.parametrize(("dtype", "bits"), DTYPES.values(), ids=DTYPES)
def test_new_scale_of_any_row_is_the_least_above_its_limit(dtype, bits):
    """Of so many bits, neighbours are 2^(1 - bits) apart at most, relatively; and the quotient is
    rounded to float32 first, by 2^-24 at most."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5000, 3, generator=generator) * torch.logspace(-30, 30, 5000)[:, None]
    scales = scales_for(weights, dtype).double()
    exact = weights.double().abs().amax(1) / LARGEST_CODE
    assert bool((scales >= exact * (1 - 2.0**-24)).all())
    assert bool((scales <= exact * (1 + 2.0**-24) * (1 + 2.0 ** (1 - bits))).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encoded_of_any_row_is_within_one_code_and_never_beyond_the_largest(dtype):
    """The quotient is rounded to float32, by half of 2^-17 below 128; the dither adds less than
    one code, and its sum is rounded likewise."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2000, 65, generator=generator)
    scales = scales_for(weights, dtype)
    for threshold in SOME_THRESHOLDS:
        codes = encoded(weights, scales, torch.full(weights.shape, threshold, dtype=torch.int32))
        assert codes.abs().max() <= LARGEST_CODE
        error = codes.double() - weights.double() / scales.double().unsqueeze(1)
        assert bool((error.abs() <= 1 + 2.0**-17).all())


def test_mean_of_codes_over_all_thresholds_is_the_weight():
    """The thresholds are 2^-16 apart and begin at 2^-17, so a mean over them errs by 2^-17 at most,
    and by 2^-17 more as they are multiplied by 1 - 2^-16; the quotient errs by 2^-18, and each sum
    likewise, as they are below 128."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.cat([torch.rand(30, generator=generator) * 2 - 1, torch.tensor([1.0, -1.0])])
    every = torch.arange(65536, dtype=torch.int32)
    scale = scales_for(weights.unsqueeze(0))
    for x in weights:
        row = x.expand(1, 65536)
        mean = encoded(row, scale, every.unsqueeze(0)).double().mean()
        assert abs(mean - x.double() / scale.double()) <= 2.0**-16 + 2.0**-18 + 2.0**-18


def test_row_of_zeros_stays_zero_whatever_the_threshold():
    weights = torch.tensor([[0.0, -0.0, 0.0]])
    for dtype in (torch.float32, torch.bfloat16):
        scales = scales_for(weights, dtype)
        assert scales.tolist() == [0.0]
        for threshold in SOME_THRESHOLDS:
            codes = encoded(weights, scales, torch.full((1, 3), threshold, dtype=torch.int32))
            assert codes.tolist() == [[0, 0, 0]] and not decoded(codes, scales).any()


@pytest.mark.parametrize("columns", [1, 48, 100, 2048, 5000])
def test_thresholds_of_rows_are_those_of_blocks_that_are_rows(columns):
    shape, first = (5, columns), 7 * columns
    found = thresholds(Rounding.DITHER, 0xDEADBEEF, first, shape, CPU)
    grid = BlockGrid(100, columns, columns)
    wanted = dither.in_blocks(0xDEADBEEF, first, 5 * columns, grid).view(shape)
    assert torch.equal(found.long(), wanted)


@pytest.mark.parametrize("rounding", [Rounding.DITHER, Rounding.HASH])
def test_thresholds_of_some_rows_are_those_in_the_whole(rounding):
    whole = thresholds(rounding, 99, 0, (12, 300), CPU)
    assert torch.equal(thresholds(rounding, 99, 5 * 300, (4, 300), CPU), whole[5:9])
