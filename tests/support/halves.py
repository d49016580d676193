# SPDX-License-Identifier: Apache-2.0
"""Every float16 as a gradient, beside the same numbers in float32."""

from dataclasses import replace

import torch
from segments import Place, copied, make, scalars_at, zero_moment
from torch import Tensor

from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS
from zero8.spec.grid import BlockGrid
from zero8.spec.segment import Segment

# Chunks of four vectors; nothing but a block's tail.
ROW_LENGTHS = [64, 7]

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
HYPERS = {"adamw": ADAMW, "l2": {**ADAMW, "decoupled": False}}

_EVERY = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
FINITE = _EVERY[_EVERY.isfinite()]
BEYOND = _EVERY[~_EVERY.isfinite()]


def among_finite(values: Tensor, row_length: int) -> Tensor:
    """Return three rows for each value, all else in them the largest finite number.

    The first two hold the i-th value once, in column i and i + 1, modulo their length; the third
    does not.

    Returns:
        (values, 3, row_length) float16.
    """
    rows = torch.full((len(values), 3, row_length), torch.finfo(torch.float16).max).half()
    number = torch.arange(len(values))
    for row in (0, 1):
        rows[number, row, (number + row) % row_length] = values
    return rows


def segments_of(codec: str | None, grad: Tensor, row_length: int, hyper: dict) -> list[Segment]:
    """Return two segments that differ in the dtype of the gradients: as given, and float32.

    Args:
        codec: of the moments.
        grad: (numel,) float16.
        row_length: at most 64, so that each row is a block.
        hyper: what `scalars_at` takes.
    """
    numel = grad.numel()
    place = Place((numel,), 64, 0, numel)
    grid = BlockGrid(-(-numel // row_length), row_length, 64)
    moments = [zero_moment(codec, rule, grid, place) for rule in ADAM.moments]
    plain = make(None, place, scalars_at(1, hyper))
    wide = replace(plain, codec=CODECS.get(codec), grid=grid, grad=grad.float(), moments=moments)
    return [replace(copied(wide), grad=grad.clone()), wide]
