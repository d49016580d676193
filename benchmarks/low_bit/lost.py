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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.low_bit.linear import codes_of, independent
from zero8.spec import dither
from zero8.spec.grid import BlockGrid
from zero8.spec.reference import stochastic_bfloat16

NUMEL = 4096
GRID = BlockGrid(num_rows=16, row_length=256, block_size=256)
SHARES = (1 / 2, 1 / 8, 1 / 64)
"""Updates over the distance of two codes."""
STEPS = 120
PATH_UPDATE, PATH_STEPS = 2**-10, 400
"""Of the path that the figure shows: updates of about 0.001."""
INT8_SCALE = 1 / 32


def _bfloat16(weights: Tensor, thresholds: Tensor | None) -> Tensor:
    if thresholds is None:
        return weights.bfloat16().float()
    return stochastic_bfloat16(weights, thresholds.long()).float()


def _int8(weights: Tensor, thresholds: Tensor | None) -> Tensor:
    return INT8_SCALE * codes_of(weights / INT8_SCALE, 127, thresholds)


@dataclass(frozen=True)
class Format:
    """Weights of few bits.

    Attributes:
        distance: between two codes, where the weights are.
        rounded: returns the stored values of weights, by thresholds or to nearest.
    """

    distance: float
    rounded: Callable[[Tensor, Tensor | None], Tensor]


FORMATS = {"bfloat16": Format(1 / 128, _bfloat16), "INT8": Format(INT8_SCALE, _int8)}


def _nearest(step: int) -> None:
    return None


def _independent(step: int) -> Tensor:
    return independent(dither.stream_key(0, step, "weight"), (NUMEL,))


def _dither(step: int) -> Tensor:
    key = dither.stream_key(0, dither.identity_of("weight"), "param")
    return dither.in_blocks(dither.phase_of(key, step), 0, NUMEL, GRID)


ROUNDINGS: dict[str, Callable[[int], Tensor | None]] = {
    "nearest": _nearest,
    "independent": _independent,
    "dither": _dither,
}
"""The thresholds of a step; None: to nearest."""


def walk(number_format: str, rounding: str, update: float, steps: int) -> Tensor:
    """Return the weights before the first and after every step, (steps + 1, NUMEL) float32."""
    weights = torch.ones(NUMEL)
    found = [weights]
    for step in range(1, steps + 1):
        thresholds = ROUNDINGS[rounding](step)
        weights = FORMATS[number_format].rounded(weights + update, thresholds)
        found.append(weights)
    return torch.stack(found)


def right_path(update: float, steps: int) -> Tensor:
    """Return what `walk` would be without rounding, for one weight: (steps + 1,) float32."""
    return 1 + update * torch.arange(steps + 1)


def paths() -> dict:
    """Return the path of the first weight in every format and rounding, and the right path."""
    size = PATH_UPDATE, PATH_STEPS
    found = {
        name: {rounding: walk(name, rounding, *size)[:, 0].tolist() for rounding in ROUNDINGS}
        for name in FORMATS
    }
    return {"update": PATH_UPDATE, "right": right_path(*size).tolist(), "formats": found}


def distances() -> list[dict]:
    """Return how far the weights are from the right path, a row per format, share and rounding."""
    return [
        _distance_row(name, share, rounding)
        for name in FORMATS
        for share in SHARES
        for rounding in ROUNDINGS
    ]


def _distance_row(name: str, share: float, rounding: str) -> dict:
    distance = FORMATS[name].distance
    size = share * distance, STEPS
    errors = (walk(name, rounding, *size) - right_path(*size)[:, None]).double() / distance
    return {
        "format": name,
        "update_codes": share,
        "rounding": rounding,
        "steps": STEPS,
        "rms_codes": errors[-1].square().mean().sqrt().item(),
        "mean_codes": errors[-1].mean().item(),
        "largest_codes": errors.abs().max().item(),
    }
