# SPDX-License-Identifier: Apache-2.0
"""The optimizer step in plain PyTorch: slow, literal, and the oracle for every kernel.

One step of an algorithm on 8-bit moments.  With g the gradient, p the parameter, and every
operation rounded once as `arithmetic.py` says:

    g  = factor * g, rounded to the wider dtype of g and p only where the factor is not 1    (R1)
    g  = sign * g                                          maximize
    g  = fma(l2, p, g)                                     only where l2 is a normal number
    moments', p' = the algorithm's                         (R2)-(R6) of zero8/spec/
    p  rounded to bfloat16 where the parameter is          equation (D2) of dither.py           (R7)
       or to INT8                                          (W1)-(W3) of int8_rows.py
    moments = quantize(moments')                           (C1)-(C11) of the codes              (R8)

A block in which any g (after (R1)) is NaN, infinite, or at least 2^63 in magnitude, so that its
square could overflow, is left exactly as it was, parameter and moments, and counted.  So is a block
in which any new moment is not finite, or any unsigned one has its sign bit set: steps on finite
gradients make no such moments, but a loaded state may hold them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec import corrections, dither, int8_rows
from zero8.spec.algorithm import MomentRule
from zero8.spec.codec import dequantize, quantize
from zero8.spec.packing import packed, unpacked
from zero8.spec.segment import Moment, Rounding, Segment

GRADIENT_LIMIT = 2.0**63
"""Gradients of at least this magnitude count as not finite."""

_BF16_INFINITY = 0x7F80


def step(segment: Segment) -> int:
    """Take one step on a segment, in place; return the number of blocks left unchanged."""
    if segment.row_scales is not None:
        return _step_int8(segment, segment.row_scales)
    s, algorithm = segment.scalars, segment.algorithm
    moments = list(zip(algorithm.moments, segment.moments, strict=True))
    block, num_blocks = segment.grid.block_numbers(segment.first, segment.param.numel())
    if segment.correction is not None:
        own = segment.param, segment.correction, segment.weight_sums
        corrections.drop_stale(*own, block, num_blocks)
    before = segment.param.clone()
    p = ieee.flush(_wide_param(segment))
    g = ieee.mul(s.grad_sign, _scaled_grad(segment))
    if s.l2 >= ieee.SMALLEST_NORMAL:
        g = ieee.fma(s.l2, p, g)
    decoded = [_decoded(segment, rule, moment, block) for rule, moment in moments]
    new, new_p = algorithm.step(s, p, g, decoded)

    valid = g.abs() < GRADIENT_LIMIT
    for (rule, _), x in zip(moments, new, strict=True):
        valid &= x.isfinite() if rule.is_signed else x.isfinite() & ~x.signbit()
    bad_blocks = torch.zeros(num_blocks, dtype=torch.bool)
    bad_blocks[block[~valid]] = True
    good = ~bad_blocks[block]

    _store_param(segment, new_p, good)
    if segment.weight_sums is not None:
        sums = corrections.new_sums(segment.param, before, block, num_blocks)
        segment.weight_sums[~bad_blocks] = sums[~bad_blocks]
    for (rule, moment), x in zip(moments, new, strict=True):
        _store(segment, rule, moment, x, good, block, bad_blocks)
    if segment.copy is not None:
        segment.copy.copy_(segment.param)
        if segment.param.dtype == torch.float32:  # of NaN torch's vector code makes others
            segment.copy[segment.param.isnan()] = torch.nan
    return int(bad_blocks.sum())


def _step_int8(segment: Segment, scales: Tensor) -> int:
    """Take one step on INT8 weights: equations (W1) to (W3) of int8_rows.py."""
    codes = segment.param.view(len(scales), segment.param.numel() // max(1, len(scales)))
    weights = int8_rows.decoded(codes, scales)
    wide = replace(segment, param=weights.view(-1), row_scales=None)
    skipped = step(wide)
    place = segment.rounding, segment.param_phase, segment.first
    if weights.numel():
        scales.copy_(int8_rows.new_scales(weights, scales))
        thresholds = int8_rows.thresholds(*place, weights.shape, weights.device)
        codes.copy_(int8_rows.encoded(weights, scales, thresholds))
    return skipped


def _scaled_grad(segment: Segment) -> Tensor:
    """Return the gradient times its factor, as if it had been stored before.

    Only gradients and products below 2^-126 differ from that: they count as 0.
    """
    grad, factor = segment.grad, segment.scalars.grad_factor
    if factor == 1.0:
        return grad.float()
    product = ieee.mul(factor, grad.float())
    return product.to(torch.promote_types(grad.dtype, segment.param.dtype)).float()


def _decoded(segment: Segment, rule: MomentRule, moment: Moment, block: Tensor) -> Tensor:
    """Return a moment times its decay."""
    decay = 1.0 if rule.decay is None else getattr(segment.scalars, rule.decay)
    if segment.codec is None:
        return ieee.mul(moment.values, decay)
    code = segment.codec.code_of(rule)
    codes = unpacked(moment.values, segment.grid, segment.first, block.numel(), code.bits)
    return dequantize(code, codes, _scales(moment), block, decay)


def _scales(moment: Moment) -> Tensor:
    assert moment.scales is not None, "a moment with a codec has scales"
    return moment.scales


def _store(
    segment: Segment,
    rule: MomentRule,
    moment: Moment,
    x: Tensor,
    good: Tensor,
    block: Tensor,
    bad_blocks: Tensor,
) -> None:
    if segment.codec is None:
        moment.values[good] = x[good]
        return
    code = segment.codec.code_of(rule)
    thresholds = _in_blocks(segment, moment.phase)
    settling = None if rule.is_dithered else segment.scalars.settling
    kept = torch.where(good, x, 0.0)
    codes, scales = quantize(code, kept, block, bad_blocks.numel(), thresholds, settling)
    place = segment.grid, segment.first
    before = unpacked(moment.values, *place, block.numel(), code.bits)
    moment.values[:] = packed(torch.where(good, codes, before), *place, code.bits)
    _scales(moment)[~bad_blocks] = scales[~bad_blocks]


def _wide_param(segment: Segment) -> Tensor:
    if segment.correction is None:
        return segment.param.float()
    return corrections.wide_weights(segment.param, segment.correction)


def _store_param(segment: Segment, p: Tensor, good: Tensor) -> None:
    if segment.correction is None:
        segment.param[good] = _rounded(p, segment)[good]
        return
    param, correction = corrected_bfloat16(p)
    segment.param[good], segment.correction[good] = param[good], correction[good]


def _rounded(p: Tensor, segment: Segment) -> Tensor:
    if segment.param.dtype == torch.float32:
        return p
    if segment.rounding == Rounding.NEAREST:
        nearest = p.to(torch.bfloat16)
        nearest[p.isnan()] = torch.nan  # torch's vector code writes another pattern
        return nearest
    if segment.rounding == Rounding.HASH:
        return stochastic_bfloat16(p, dither.hashed(segment.param_phase, segment.first, p.numel()))
    return stochastic_bfloat16(p, _in_blocks(segment, segment.param_phase))


def _in_blocks(segment: Segment, phase: int) -> Tensor:
    return dither.in_blocks(phase, segment.first, segment.param.numel(), segment.grid)


def stochastic_bfloat16(x: Tensor, threshold: Tensor) -> Tensor:
    """Round to bfloat16, up in magnitude where the dropped 16 bits + threshold carry.

    Over thresholds uniform in 0..65535 the mean is x exactly; a value that bfloat16 holds never
    moves, and a finite value never becomes infinite (it is truncated instead).
    """
    bits = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = ((bits + threshold) >> 16) & 0xFFFF
    overflow = (rounded & _BF16_INFINITY) == _BF16_INFINITY
    high = torch.where(overflow, bits >> 16, rounded)
    high = torch.where(x.isnan(), _BF16_INFINITY | 0x40, high)
    return high.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def corrected_bfloat16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round to 24 bits, half up in magnitude, as the nearest bfloat16 and a signed int8 remainder.

    x = float_from_bits((param << 16) + (correction << 8)), within 2^-17 of its magnitude.  Where
    the nearest bfloat16 of a finite x is infinite, both parts are the largest finite ones.
    """
    bits = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    wide = (bits + 128) >> 8
    nearest, remainder = (wide + 128) >> 8, wide & 0xFF
    beyond = (nearest & _BF16_INFINITY) == _BF16_INFINITY
    high = torch.where(beyond, bits >> 16, nearest)
    low = torch.where(beyond, remainder.clamp(max=127), remainder)
    high = torch.where(x.isnan(), _BF16_INFINITY | 0x40, high)
    low = torch.where(x.isnan(), 0, low)
    # Narrowing keeps the low bits, which are in two's complement.
    param = high.to(torch.int32).to(torch.int16).view(torch.bfloat16)
    return param, low.to(torch.int32).to(torch.int8)
