# SPDX-License-Identifier: Apache-2.0
"""Small updates of weights of 8 or 16 bits: which roundings lose them.

All weights start at 1 and get the same update in every step.  Both codes have 1 exactly:

- bfloat16: from 1 to 2 neighbours are 1/128 apart.
- INT8 with a scale per row, as weights of quantized training have.  The row's largest weight, which
  gets no update, is 127/32, as in a row of 16000 normal weights whose standard deviation is 1.  So
  the scale stays 1/32, and 1 has the code 32.

Updates are powers of 2, so that float32 weights are exact sums.  The numbers of steps keep weights
below 2 and below the largest code.
"""

import torch
from torch import Tensor

from zero8.spec import dither
from zero8.spec.grid import BlockGrid
from zero8.spec.reference import stochastic_bfloat16

NUMEL = 4096
GRID = BlockGrid(num_rows=16, row_length=256, block_size=256)
THRESHOLDS = 2**16
LARGEST_CODE = 127
CODES = {"bfloat16": 1 / 128, "INT8": 1 / 32}
"""The distance of two codes, where the weights are."""


def independent(step: int) -> Tensor:
    """Return thresholds from a generator that is new at each step, (NUMEL,) int64."""
    generator = torch.Generator().manual_seed(dither.stream_key(0, step, "weight"))
    return torch.randint(THRESHOLDS, (NUMEL,), generator=generator)


def golden(step: int) -> Tensor:
    """Return zero8's thresholds, (NUMEL,)."""
    key = dither.stream_key(0, dither.identity_of("weight"), "param")
    return dither.in_blocks(dither.phase_of(key, step), 0, NUMEL, GRID)


ROUNDINGS = {"nearest": lambda step: None, "independent": independent, "dither": golden}
"""The thresholds of a step, 0 to 65535; None: to nearest."""


def rounded(number_format: str, weights: Tensor, thresholds: Tensor | None) -> Tensor:
    """Return the stored values of weights, float32.

    A code of INT8 is floor(x + (threshold + 0.5) / 65536), whose mean over all thresholds is x, up
    to 2^-17.
    """
    if number_format == "bfloat16":
        if thresholds is None:
            return weights.bfloat16().float()
        return stochastic_bfloat16(weights, thresholds.long()).float()
    scaled = weights / CODES[number_format]
    if thresholds is None:
        codes = scaled.round()
    else:
        codes = (scaled + (thresholds.float() + 0.5) / THRESHOLDS).floor()
    return CODES[number_format] * codes.clamp(-LARGEST_CODE, LARGEST_CODE)


def walk(number_format: str, rounding: str, update: float, steps: int) -> Tensor:
    """Return the weights before the first and after every step, (steps + 1, NUMEL) float32."""
    found = [torch.ones(NUMEL)]
    for step in range(1, steps + 1):
        found.append(rounded(number_format, found[-1] + update, ROUNDINGS[rounding](step)))
    return torch.stack(found)


def right_path(update: float, steps: int) -> Tensor:
    """Return what `walk` would be without rounding, for one weight: (steps + 1,) float32."""
    return 1 + update * torch.arange(steps + 1)


def distance(number_format: str, share: float, rounding: str, steps: int) -> dict:
    """Return how far weights are from the right path; it and the update `share` are in codes."""
    code = CODES[number_format]
    right = right_path(share * code, steps)[:, None]
    errors = (walk(number_format, rounding, share * code, steps) - right).double() / code
    return {
        "weights": number_format,
        "update": share,
        "rounding": rounding,
        "RMS distance": errors[-1].square().mean().sqrt().item(),
        "mean distance": errors[-1].mean().item(),
        "largest distance": errors.abs().max().item(),
    }
