# SPDX-License-Identifier: Apache-2.0
"""The share of one rank: its number of elements, and the bytes of their moments.

ZeRO 1 and 2 concatenate all parameters and cut the whole into equal parts; ZeRO 3 cuts every
parameter; FSDP2 cuts every parameter between rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from zero8.plan.model import Model
from zero8.plan.setup import Setup
from zero8.spec.codec import codec_named
from zero8.spec.grid import BlockGrid

FLAT_ALIGNMENT = 2
"""ZeRO 1 and 2 pad each rank's part to a multiple of this many elements."""


@dataclass(frozen=True)
class Share:
    """The largest share of a rank.

    Attributes:
        numel: elements, padding included.
        touched_numel: elements of all parameters that the rank holds a part of.
        fp32_bytes: moments of the fp32 optimizer.
        zero8_bytes: codes, scales and float32 moments of zero8.
    """

    numel: int
    touched_numel: int
    fp32_bytes: int
    zero8_bytes: int


def share_of(model: Model, setup: Setup) -> Share:
    """Return the share of one rank."""
    if setup.engine == "fsdp2" or setup.stage == 3:
        numel, zero8_bytes = _of_each_parameter(model, setup)
        touched_numel = model.numel
    else:
        numel, touched_numel, zero8_bytes = _of_flat(model, setup)
    return Share(numel, touched_numel, 4 * len(setup.algorithm.moments) * numel, zero8_bytes)


def _of_each_parameter(model: Model, setup: Setup) -> tuple[int, int]:
    """Return numel and zero8_bytes of the first rank, as no rank has more."""
    grid_of = _grids(setup)
    numel = zero8_bytes = 0
    counts = model.shapes.items() if not setup.policy.fp32_params else ()
    named = [("", shape, count) for shape, count in counts]
    named = named or [(name, shape, 1) for name, shape in model.params]
    for name, shape, count in named:
        here = _first_part(shape, setup)
        numel += count * here
        held = min(here, math.prod(shape))
        zero8_bytes += count * _moment_bytes(setup, grid_of(name, shape), 0, held)
    return numel, zero8_bytes


def _first_part(shape: tuple[int, ...], setup: Setup) -> int:
    if setup.engine == "fsdp2" and shape:
        return -(-shape[0] // setup.world_size) * math.prod(shape[1:])
    return -(-math.prod(shape) // setup.world_size)


def _of_flat(model: Model, setup: Setup) -> tuple[int, int, int]:
    ranks = 1 if setup.stage == 0 else setup.world_size
    unit = FLAT_ALIGNMENT * ranks
    numel = -(-model.numel // unit) * unit // ranks
    grid_of = _grids(setup)
    bytes_of, touched_by = [0] * ranks, [0] * ranks
    for name, shape, rank, first, held in _pieces(model, numel):
        bytes_of[rank] += _moment_bytes(setup, grid_of(name, shape), first, held)
        touched_by[rank] += math.prod(shape)
    return numel, max(touched_by), max(bytes_of)


def _pieces(model: Model, rank_numel: int) -> Iterator[tuple[str, tuple[int, ...], int, int, int]]:
    """Yield (name, shape, rank, first element in the parameter, numel) of all ranks' pieces."""
    at = 0
    for name, shape in model.params:
        first, numel = 0, math.prod(shape)
        while first < numel:
            rank = (at + first) // rank_numel
            end = min(numel, (rank + 1) * rank_numel - at)
            yield name, shape, rank, first, end - first
            first = end
        at += numel


def _grids(setup: Setup):
    """Return a function: the block grid of a parameter, None for float32 moments."""
    if setup.policy.fp32_params:
        return lambda name, shape: setup.policy.decide(name, shape).grid
    of_shape = lru_cache(maxsize=None)(lambda shape: setup.policy.decide(None, shape).grid)
    return lambda name, shape: of_shape(shape)


def _moment_bytes(setup: Setup, grid: BlockGrid | None, first: int, numel: int) -> int:
    moments = setup.algorithm.moments
    if grid is None:
        return 4 * len(moments) * numel
    codec = codec_named(setup.codec)
    scales = sum(math.prod(codec.code_of(rule).scale_shape) for rule in moments)
    return len(moments) * numel + 4 * scales * grid.num_blocks_touched(first, numel)
