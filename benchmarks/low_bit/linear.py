# SPDX-License-Identifier: Apache-2.0
"""Linear codes: integers times a scale, rounded to nearest or by thresholds of 16 bits."""

import torch
from torch import Tensor

from zero8.spec import int8_rows
from zero8.spec.segment import Rounding

BLOCK_SIZE = 256
THRESHOLDS = 2**16
"""The number of thresholds: 0 to 65535."""


def codes_of(scaled: Tensor, largest: int, thresholds: Tensor | None) -> Tensor:
    """Return the codes of values that are given over their scale; float32 integers.

    A code is floor(x + (threshold + 0.5) / 65536), so that over all thresholds its mean is x, up to
    2^-17, and an integer never moves.

    Args:
        scaled: float32.
        largest: the largest magnitude of a code.
        thresholds: integers in 0..65535, shaped as `scaled`; None rounds to nearest, ties to even.
    """
    if thresholds is None:
        codes = scaled.round()
    else:
        codes = (scaled + shifts_of(thresholds)).floor_()
    return codes.clamp_(-largest, largest)


def shifts_of(thresholds: Tensor) -> Tensor:
    """Return what is added to values before they are rounded down: float32, above 0, below 1."""
    return (thresholds.float() + 0.5).div_(THRESHOLDS)


def independent(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Return thresholds from a generator of this seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(THRESHOLDS, shape, generator=generator, dtype=torch.int32)


def golden(phase: int, numel: int) -> Tensor:
    """Return zero8's thresholds of a row in whole blocks: those of `dither.in_blocks`.

    Shape (numel / 256, 256), int64 in 0..65535.
    """
    shape = numel // BLOCK_SIZE, BLOCK_SIZE
    found = int8_rows.thresholds(Rounding.DITHER, phase, 0, shape, torch.device("cpu"))
    assert found is not None, "only rounding to nearest has none"
    return found.long()
