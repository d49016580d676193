# SPDX-License-Identifier: Apache-2.0
"""The share of one rank: its number of elements, and the bytes of their moments.

ZeRO 1 and 2 concatenate all parameters and cut the whole into equal parts; ZeRO 3 cuts every
parameter; FSDP2 cuts every parameter between rows.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from zero8.plan.groups import groups_of
from zero8.plan.model import Model, Param
from zero8.plan.setup import Setup
from zero8.spec.algorithm import Algorithm
from zero8.spec.codec import codec_named
from zero8.spec.grid import BlockGrid

FLAT_ALIGNMENT = 2
"""ZeRO 1 and 2 pad each rank's part to a multiple of this many elements."""


@dataclass(frozen=True)
class Share:
    """The largest share of a rank.

    Attributes:
        numel: elements, padding included.
        weight_bytes: weights that the optimizer updates.
        touched_numel: elements of all parameters that the rank holds a part of.
        fp32_bytes: moments of the fp32 optimizer.
        zero8_bytes: codes, scales and float32 moments of zero8.
    """

    numel: int
    weight_bytes: int
    touched_numel: int
    fp32_bytes: int
    zero8_bytes: int


def share_of(model: Model, setup: Setup) -> Share:
    """Return the share of one rank."""
    groups = groups_of(model, setup)
    if setup.engine == "fsdp2" or setup.stage == 3:
        return _of_each_parameter(groups, setup)
    return _of_flat(groups, setup)


def _of_each_parameter(groups: Sequence[tuple[Algorithm, Sequence[Param]]], setup: Setup) -> Share:
    """Return the share of the first rank, as no rank has more."""
    grid_of = _grids(setup)
    numel = weights = touched = fp32_bytes = zero8_bytes = 0
    for algorithm, params in groups:
        for (name, shape), count in _counted(params, setup).items():
            here, whole = first_part(shape, setup), math.prod(shape)
            numel += count * here
            weights += count * weight_bytes((name, shape), here, setup, setup.master_bytes)
            touched += count * whole
            fp32_bytes += count * _fp32_bytes(algorithm, here)
            held = _moment_bytes(setup, algorithm, grid_of(name, shape), 0, min(here, whole))
            zero8_bytes += count * held
    return Share(numel, weights, touched, fp32_bytes, zero8_bytes)


def _counted(params: Sequence[Param], setup: Setup) -> Counter[Param]:
    """Return the parameters with their numbers, without names where these do not matter."""
    if setup.policy.fp32_params or setup.has_int8_weights:
        return Counter(params)
    return Counter(("", shape) for _, shape in params)


def weight_bytes(param: Param, numel: int, setup: Setup, element_bytes: int) -> int:
    """Return the bytes of elements of a parameter, whole rows if its weights are INT8.

    Args:
        param: the parameter.
        numel: number of elements.
        setup: the run.
        element_bytes: of a weight that is not INT8, and of a scale.
    """
    if not (setup.has_int8_weights and is_linear(param)):
        return element_bytes * numel
    _, (_, columns) = param
    return numel + element_bytes * numel // columns


def is_linear(param: Param) -> bool:
    """Return whether a parameter is taken as the weight of a linear layer."""
    name, shape = param
    return len(shape) == 2 and "embed" not in name


def first_part(shape: tuple[int, ...], setup: Setup) -> int:
    """Return the elements of the first rank if each parameter is cut; others have no more."""
    if setup.engine == "fsdp2" and shape:
        return -(-shape[0] // setup.world_size) * math.prod(shape[1:])
    return -(-math.prod(shape) // setup.world_size)


def _of_flat(groups: Sequence[tuple[Algorithm, Sequence[Param]]], setup: Setup) -> Share:
    ranks = 1 if setup.stage == 0 else setup.world_size
    grid_of = _grids(setup)
    numel = fp32_bytes = 0
    bytes_of, touched_by = [0] * ranks, [0] * ranks
    for algorithm, params in groups:
        rank_numel = flat_numel(params, ranks)
        numel += rank_numel
        fp32_bytes += _fp32_bytes(algorithm, rank_numel)
        for place, rank, first, held in pieces_of(params, rank_numel):
            name, shape = params[place]
            bytes_of[rank] += _moment_bytes(setup, algorithm, grid_of(name, shape), first, held)
            touched_by[rank] += math.prod(shape)
    return Share(numel, setup.master_bytes * numel, max(touched_by), fp32_bytes, max(bytes_of))


def flat_numel(params: Sequence[Param], ranks: int) -> int:
    """Return the elements of each rank's part of some parameters, padding included."""
    unit = FLAT_ALIGNMENT * ranks
    return -(-sum(math.prod(shape) for _, shape in params) // unit) * FLAT_ALIGNMENT


def pieces_of(params: Sequence[Param], rank_numel: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (place of the parameter, rank, its first element there, numel) of all ranks' pieces."""
    at = 0
    for place, (_, shape) in enumerate(params):
        first, numel = 0, math.prod(shape)
        while first < numel:
            rank = (at + first) // rank_numel
            end = min(numel, (rank + 1) * rank_numel - at)
            yield place, rank, first, end - first
            first = end
        at += numel


def _grids(setup: Setup):
    """Return a function: the block grid of a parameter, None for float32 moments."""
    if setup.policy.fp32_params:
        return lambda name, shape: setup.policy.decide(name, shape).grid
    of_shape = lru_cache(maxsize=None)(lambda shape: setup.policy.decide(None, shape).grid)
    return lambda name, shape: of_shape(shape)


def _fp32_bytes(algorithm: Algorithm, numel: int) -> int:
    return 4 * len(algorithm.moments) * numel


def _moment_bytes(
    setup: Setup, algorithm: Algorithm, grid: BlockGrid | None, first: int, numel: int
) -> int:
    if grid is None:
        return _fp32_bytes(algorithm, numel)
    codec = codec_named(setup.codec)
    codes = [codec.code_of(rule) for rule in algorithm.moments]
    scales = sum(math.prod(code.scale_shape) for code in codes)
    code_bytes = sum(grid.num_bytes(first, numel, code.bits) for code in codes)
    return code_bytes + 4 * scales * grid.num_blocks_touched(first, numel)
