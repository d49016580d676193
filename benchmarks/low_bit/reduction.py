# SPDX-License-Identifier: Apache-2.0
"""Averages over ranks of gradients that every rank sends in 8 or 4 bits.

Blocks of 256 elements have a scale, their largest magnitude over the largest code, as gradients
have in ZeRO++ (qgZ).  Every gradient is rounded once, where qgZ rounds again between hosts, and
decoded values are added in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.low_bit.linear import (
    BLOCK_SIZE,
    THRESHOLDS,
    codes_of,
    golden,
    independent,
    shifts_of,
)
from zero8.spec import dither

LARGEST_CODES = {"INT8": 127, "INT4": 7}


@dataclass(frozen=True)
class Place:
    """What thresholds are a function of, besides the element.

    Attributes:
        seed: of the run.
        step: counted from 0.
        rank: the sender.
        num_ranks: the number of ranks.
        numel: elements of a gradient, in whole blocks.
    """

    seed: int
    step: int
    rank: int
    num_ranks: int
    numel: int


def _nearest(place: Place) -> None:
    return None


def _independent(place: Place) -> Tensor:
    key = dither.stream_key(place.seed, place.step, f"rank {place.rank}")
    return independent(key, (place.numel // BLOCK_SIZE, BLOCK_SIZE))


def _golden_of(place: Place, stream: str) -> Tensor:
    key = dither.stream_key(place.seed, dither.identity_of("gradient"), stream)
    return golden(dither.phase_of(key, place.step), place.numel)


def _dither(place: Place) -> Tensor:
    return _golden_of(place, f"rank {place.rank}")


def _spread(place: Place) -> Tensor:
    shift = place.rank * THRESHOLDS // place.num_ranks
    return _golden_of(place, "all ranks") + shift & THRESHOLDS - 1


@dataclass(frozen=True)
class Rounding:
    """How ranks round what they send.

    Attributes:
        thresholds: returns those of a rank's elements in blocks; None: to nearest.
        is_subtracted: whether the receiver, who can compute the thresholds, too, subtracts them.
    """

    thresholds: Callable[[Place], Tensor | None]
    is_subtracted: bool = False


ROUNDINGS = {
    "nearest": Rounding(_nearest),
    "independent": Rounding(_independent),
    "dither": Rounding(_dither),
    "dither, spread over ranks": Rounding(_spread),
    "dither, subtracted": Rounding(_dither, is_subtracted=True),
    "dither, spread and subtracted": Rounding(_spread, is_subtracted=True),
}


def average(grads: Tensor, number_format: str, rounding: str, seed: int, step: int) -> Tensor:
    """Return the average of quantized gradients.

    Args:
        grads: (number of ranks, numel) float32, numel in whole blocks.
        number_format: a key of `LARGEST_CODES`.
        rounding: a key of `ROUNDINGS`.
        seed: of the thresholds.
        step: counted from 0.

    Returns:
        (numel,) float32.
    """
    num_ranks, numel = grads.shape
    total = torch.zeros(numel // BLOCK_SIZE, BLOCK_SIZE)
    for rank, grad in enumerate(grads):
        place = Place(seed, step, rank, num_ranks, numel)
        blocks = grad.view(-1, BLOCK_SIZE)
        total += _decoded(blocks, LARGEST_CODES[number_format], ROUNDINGS[rounding], place)
    return total.div_(num_ranks).flatten()


def _decoded(blocks: Tensor, largest: int, rounding: Rounding, place: Place) -> Tensor:
    """Return the values of blocks after they have been sent."""
    scales = blocks.abs().amax(1, keepdim=True) / largest
    thresholds = rounding.thresholds(place)
    # A block of zeros has the scale 0, by which its codes are multiplied.
    codes = codes_of(blocks / scales.clamp(min=torch.finfo().tiny), largest, thresholds)
    if rounding.is_subtracted:
        codes -= shifts_of(thresholds) - 0.5
    return codes.mul_(scales)
