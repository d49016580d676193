# SPDX-License-Identifier: Apache-2.0
"""Corrections: the 8 bits below a bfloat16 weight, and which weights they belong to.

A correction is a signed remainder: the weight with it is `float_from_bits((weight << 16) +
(correction << 8))`.  Scripts write weights without their corrections: masks, new rows, loaded
models.  So each step leaves sums of the weights of each block beside them, by which the next one
finds out whether they are still there.  Of a block of weights w[0], w[1], ..., as bits:

    t    = w[2 k] + (w[2 k + 1] << 16), of the weights that are not +-0                      (K1)
    x    = t * (2 k + 1) * 0x9E3779B9
    sum  = sum over k of x ^ (x >> 15), all modulo 2^32

    a block is of other weights where a step has left sums and `sum` is neither of them      (K2)

The corrections of such a block are dropped: set to 0.  The step's sums are one of all its weights,
and one of those that were not 0 before it: a mask that is applied after every step makes weights 0
again, so the others keep their corrections.  A weight of +-0, an infinite one, and NaN have none:
added to them it would make other numbers of them, and NaN of 0.
"""

import torch
from torch import Tensor

from zero8.spec import dither

_MAGNITUDE, _INFINITY = 0x7FFF, 0x7F80


def wide_weights(weights: Tensor, correction: Tensor) -> Tensor:
    """Return bfloat16 weights with their corrections, int8 of the same shape, as float32."""
    correction = torch.where(_are_corrected(weights), correction, 0)
    bits = weights.view(torch.int16).to(torch.int32) << 16
    return (bits + (correction.to(torch.int32) << 8)).view(torch.float32)


def drop_stale(
    weights: Tensor, correction: Tensor, sums: Tensor | None, block: Tensor, num_blocks: int
) -> None:
    """Set the corrections to 0, in place, that do not belong to the bfloat16 weights.

    `sums` are (num_blocks, 2) int32 that the last step has left, 0 if none has; None without.
    """
    are_ours = _are_corrected(weights)
    if sums is not None:
        is_known = sums[:, 0] != 0
        is_other = is_known & (sums != _sums(weights, block, num_blocks)[:, None]).all(dim=1)
        are_ours &= ~is_other[block]
    correction[~are_ours] = 0


def new_sums(weights: Tensor, before: Tensor, block: Tensor, num_blocks: int) -> Tensor:
    """Return the sums, (num_blocks, 2) int32, of weights that a step has written; see (K2)."""
    without_zeros = torch.where(_is_zero(before), 0, weights)
    both = [_sums(one, block, num_blocks) for one in (weights, without_zeros)]
    return torch.stack(both, dim=1)


def _are_corrected(weights: Tensor) -> Tensor:
    return ~_is_zero(weights) & (_bits(weights) & _MAGNITUDE < _INFINITY)


def _is_zero(weights: Tensor) -> Tensor:
    return _bits(weights) & _MAGNITUDE == 0


def _bits(weights: Tensor) -> Tensor:
    return weights.view(torch.int16).to(torch.int64) & 0xFFFF


def _sums(weights: Tensor, block: Tensor, num_blocks: int) -> Tensor:
    """Return the sum (K1) of each block, as int32."""
    if weights.numel() == 0:
        return torch.zeros(num_blocks, dtype=torch.int32, device=weights.device)
    begin = torch.searchsorted(block, torch.arange(num_blocks, device=block.device))
    place = torch.arange(weights.numel(), device=block.device) - begin[block]
    bits = torch.where(_is_zero(weights), 0, _bits(weights)) << 16 * (place % 2)
    num_pairs = int(place.max()) // 2 + 1
    pairs = torch.zeros(num_blocks, num_pairs, dtype=torch.int64, device=weights.device)
    pairs.view(-1).index_add_(0, block * num_pairs + place // 2, bits)
    factors = (2 * torch.arange(num_pairs, device=weights.device) + 1) * dither.GOLDEN_STEP
    x = pairs * factors & 0xFFFFFFFF
    return (x ^ x >> 15).sum(dim=1).to(torch.int32)
