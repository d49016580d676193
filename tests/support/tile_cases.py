# SPDX-License-Identifier: Apache-2.0
"""Random segments whose v is of rank 1 in tiles, for tests of the compiled steps."""

import math
import random

import torch
from segments import KINDS, Place, correct, gradient, make, scalars_at

from zero8.op import kernel
from zero8.spec.segment import Rounding, Segment

FP32, BF16 = torch.float32, torch.bfloat16

ROWS = (1, 1, 2, 3, 5, 17, 31, 33, 63, 64, 65, 127, 128, 200)
COLUMNS = (64, 65, 100, 127, 128, 257, 700, 1025, 4096 + 300, 9000)
BLOCK_SIZES = (64, 64, 128, 256, 256, 512, 1024, 2048, 4096)
MAX_NUMEL = 60_000
"""Of a random case: the reference takes the rows of a tile one by one."""


def place_of(chance: random.Random) -> Place:
    """Return a place anywhere in a parameter: whole bands, parts of rows, a few elements."""
    columns = chance.choice(COLUMNS)
    rows = min(chance.choice(ROWS), MAX_NUMEL // columns)
    numel = rows * columns
    first, end = 0, numel
    if chance.random() < 0.6:
        first, end = sorted(chance.randrange(numel + 1) for _ in range(2))
    elif chance.random() < 0.3:
        first = chance.randrange(numel)
        end = min(numel, first + chance.choice((0, 1, 2, 63, 64, 65, 300)))
    block_size = chance.choice(BLOCK_SIZES)
    return Place((rows, columns), block_size, first, end - first, offset=chance.randrange(4))


def hyper_of(chance: random.Random) -> dict:
    return {
        "lr": 10 ** chance.uniform(-5, 0),
        "betas": (chance.choice((0.0, 0.9, 0.95)), chance.choice((0.0, 0.25, 0.95, 0.999))),
        "eps": chance.choice((2.0**-126, 1e-15, 1e-8)),
        "weight_decay": chance.choice((0.0, 1e-40, 0.1)),
        "decoupled": chance.random() < 0.7,
        "maximize": chance.random() < 0.2,
        "grad_factor": chance.choice((1.0, 1.0, 0.3)),
    }


def segment_of(place: Place, hyper: dict, chance: random.Random) -> Segment:
    """Return a segment of one of all kinds of parameters."""
    dtype, rounding = chance.choice((FP32, FP32, BF16)), chance.choice(list(Rounding))
    grad_dtype = chance.choice(kernel.DTYPES[dtype])
    segment = make("shared", place, scalars_at(1, hyper), dtype, grad_dtype, rounding)
    if chance.random() < 0.3:
        copy_dtype = chance.choice(kernel.COPY_DTYPES[dtype])
        segment.copy = torch.full((place.numel,), 3, dtype=copy_dtype)
    if dtype == BF16 and chance.random() < 0.3:
        generator = torch.Generator().manual_seed(place.numel)
        correction = torch.randint(-128, 128, (place.numel,), generator=generator)
        correct(segment, correction)
    return segment


def new_gradient(segment: Segment, chance: random.Random) -> torch.Tensor:
    """Return a gradient of one of several kinds, some with rows and columns of 0, or no numbers."""
    numel, dtype, seed = segment.grad.numel(), segment.grad.dtype, chance.randrange(2**32)
    generator = torch.Generator().manual_seed(seed)
    grad = gradient(chance.randrange(KINDS), numel, seed, dtype).float()
    index = torch.arange(segment.first, segment.first + numel)
    row, column = index // segment.grid.row_length, index % segment.grid.row_length
    for place in (row, column):
        if numel and chance.random() < 0.6:
            factor = 2.0 ** torch.randint(-30, 10, (int(place.max()) + 1,), generator=generator)
            factor[torch.rand(factor.numel(), generator=generator) < 0.2] = 0.0
            grad *= factor[place]
    if chance.random() < 0.4:
        bad = torch.rand(numel, generator=generator) < chance.choice((3 / (numel + 1), 0.02))
        grad[bad] = chance.choice((math.nan, math.inf, 2.0**60, -(2.0**62)))
    if chance.random() < 0.05:
        grad[:] = chance.choice((math.nan, 0.0))
    return grad.to(dtype)
