# SPDX-License-Identifier: Apache-2.0
"""The largest share of a rank: its number of elements, and the bytes of their moments.

ZeRO 1 and 2 concatenate all parameters and cut the whole into equal parts; ZeRO 3 cuts every
parameter; FSDP2 cuts every parameter between rows.  They do so to the parameters of each algorithm.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

from zero8.optimizer.muon import is_for_muon, largest_first
from zero8.plan.model import Model, Param
from zero8.plan.setup import Setup
from zero8.spec.adam import ADAM
from zero8.spec.algorithm import Algorithm
from zero8.spec.codec import codec_named
from zero8.spec.muon import MUON

FLAT_ALIGNMENT = 2
"""ZeRO 1 and 2 pad each rank's part to a multiple of this many elements."""

ByAlgorithm = Mapping[Algorithm, Sequence[Param]]


@dataclass(frozen=True)
class Share:
    """The largest share of a rank.

    Attributes:
        numels: elements of each tensor that the optimizer updates, padding included: a parameter,
            or a whole group of ZeRO 1 and 2.
        weights_bytes: of each of these tensors.
        touched: of ZeRO 1 and 2, elements of each parameter that the rank holds a part of.
        moments_bytes: codes, scales and float32 moments.
    """

    numels: tuple[int, ...]
    weights_bytes: tuple[int, ...]
    touched: tuple[int, ...]
    moments_bytes: int

    @cached_property
    def numel(self) -> int:
        """All elements."""
        return sum(self.numels)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights that the optimizer updates."""
        return sum(self.weights_bytes)


@lru_cache(maxsize=32)  # memory and step both ask for it
def share_of(model: Model, setup: Setup) -> Share:
    """Return the share of one rank."""
    is_cut_by_parameter = setup.engine == "fsdp2" or setup.stage == 3
    of = _of_each_parameter if is_cut_by_parameter else _of_flat
    return of(_by_algorithm(model, setup), setup)


def _by_algorithm(model: Model, setup: Setup) -> ByAlgorithm:
    """Return the parameters of each algorithm, as `zero8.optimizer.muon` splits them."""
    if not setup.algorithm.is_of_matrices:
        return {setup.algorithm: model.params}
    split: dict[Algorithm, list[Param]] = {MUON: [], ADAM: []}
    for param in model.params:
        split[MUON if is_for_muon(*param, setup.adam_params) else ADAM].append(param)
    if setup.engine == "deepspeed":
        split[MUON] = largest_first(split[MUON], lambda param: param[1])
    return split


def _of_each_parameter(by_algorithm: ByAlgorithm, setup: Setup) -> Share:
    """Return the share of the first rank, as no rank has more."""
    moments_bytes = 0
    numels: list[int] = []
    weights_bytes: list[int] = []
    for algorithm, params in by_algorithm.items():
        shards = [_first_part(shape, setup) for _, shape in params]
        numels += shards
        weights_bytes += map(partial(_weight_bytes, setup), params, shards)
        # Only `fp32_params` looks at names: without them, parameters of one shape count at once.
        alike = [(name if setup.policy.fp32_params else "", shape) for name, shape in params]
        for (param, numel), count in Counter(zip(alike, shards, strict=True)).items():
            moments_bytes += count * _moments_bytes(setup, algorithm, param, 0, numel)
    return Share(tuple(numels), tuple(weights_bytes), (), moments_bytes)


def _weight_bytes(setup: Setup, param: Param, numel: int) -> int:
    name, shape = param
    if setup.has_int8_weights and len(shape) == 2 and "embed" not in name:
        return numel + setup.master_bytes * numel // shape[1]  # a scale per row
    return setup.master_bytes * numel


def _first_part(shape: tuple[int, ...], setup: Setup) -> int:
    if setup.engine == "fsdp2" and shape:
        return -(-shape[0] // setup.world_size) * math.prod(shape[1:])
    return -(-math.prod(shape) // setup.world_size)


def _of_flat(by_algorithm: ByAlgorithm, setup: Setup) -> Share:
    ranks = 1 if setup.stage == 0 else setup.world_size
    numels = []
    bytes_of: list[int] = [0] * ranks
    touched_by: list[list[int]] = [[] for _ in range(ranks)]
    for algorithm, params in by_algorithm.items():
        total = sum(math.prod(shape) for _, shape in params)
        rank_numel = -(-total // (FLAT_ALIGNMENT * ranks)) * FLAT_ALIGNMENT
        numels.append(rank_numel)
        for param, rank, first, held in _pieces(params, rank_numel):
            bytes_of[rank] += _moments_bytes(setup, algorithm, param, first, held)
            touched_by[rank].append(math.prod(param[1]))
    weights_bytes = tuple(setup.master_bytes * numel for numel in numels)
    touched = tuple(max(touched_by, key=sum))
    return Share(tuple(numels), weights_bytes, touched, max(bytes_of))


def _pieces(params: Sequence[Param], rank_numel: int) -> Iterator[tuple[Param, int, int, int]]:
    """Yield (parameter, rank, its first element there, numel) of all ranks' pieces."""
    at = 0
    for param in params:
        first, numel = 0, math.prod(param[1])
        while first < numel:
            rank = (at + first) // rank_numel
            end = min(numel, (rank + 1) * rank_numel - at)
            yield param, rank, first, end - first
            first = end
        at += numel


def _moments_bytes(setup: Setup, algorithm: Algorithm, param: Param, first: int, numel: int) -> int:
    grid = setup.policy.decide(*param).grid if setup.is_8bit else None
    if grid is None:
        return 4 * len(algorithm.moments) * numel
    codec = codec_named(setup.codec)
    codes = [codec.code_of(rule) for rule in algorithm.moments]
    scales = sum(math.prod(code.scale_shape) for code in codes)
    code_bytes = sum(grid.num_bytes(first, numel, code.bits) for code in codes)
    return code_bytes + 4 * scales * grid.num_blocks_touched(first, numel)
