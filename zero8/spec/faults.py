# SPDX-License-Identifier: Apache-2.0
"""What is wrong with codes and scales that came from outside.

A step takes for granted that they decode to finite numbers, and to none below zero where a moment
cannot be negative: one that does not makes weights NaN, and nothing says so.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from zero8.spec.codec import MomentCode, dequantize
from zero8.spec.log import LogCode, SignedLogCode
from zero8.spec.retired import LogRootCode, SignMagnitudeLogCode

_CHUNK_NUMEL = 1 << 22


BlockNumbers = Callable[[int, int], Tensor]
"""Returns the block of each element from the first number to before the second, int64."""


def fault(code: MomentCode, codes: Tensor, scales: Tensor, block_numbers: BlockNumbers) -> str:
    """Return what is wrong with a moment, "" if nothing is.

    Args:
        code: the code of this moment.
        codes: (numel,) uint8.
        scales: (num_blocks, *code.scale_shape) float32.
        block_numbers: of the elements; seldom called.
    """
    if not scales.isfinite().all():
        return "a scale that is not finite"
    if not code.signed and (scales < 0).any():
        return "a negative scale"
    if isinstance(code, LogCode):
        return _fault_of_log(code, codes, scales, block_numbers)
    if isinstance(code, SignMagnitudeLogCode | LogRootCode):  # read once, then encoded again
        every = block_numbers(0, codes.numel())
        return fault_of_values(dequantize(code, codes, scales, every), is_signed=code.signed)
    if isinstance(code, SignedLogCode):
        largest = torch.where(scales < 0, code.wide.top, code.narrow.top) * scales
        if not largest.isfinite().all():
            return "a scale of which the largest code is not finite"
        if any((chunk == 128).any() for chunk in codes.split(_CHUNK_NUMEL)):
            return "a code of -128, expected -127 to 127"
    return ""


def fault_of_values(values: Tensor, *, is_signed: bool) -> str:
    """Return what is wrong with a moment in float32, "" if nothing is.

    Args:
        values: of any shape.
        is_signed: whether it can be negative.
    """
    largest = torch.finfo(torch.float32).max
    if values.dtype == torch.float64 and values.numel() and values.abs().max() > largest:
        return "a value that float32 does not hold"
    # A sum is not finite if one of its terms is not: one pass, and no copy.
    if not math.isfinite(values.sum(dtype=torch.float64)):
        return "a value that is not finite"
    if not is_signed and values.numel() and values.min() < 0:
        return "a negative value"
    return ""


def _fault_of_log(code: LogCode, codes: Tensor, scales: Tensor, block_numbers: BlockNumbers) -> str:
    high, step = scales.unbind(1)
    least, most = ((16 * span + 127) // 254 for span in (code.MIN_SPAN, code.MAX_SPAN))
    in_range = (step >= least) & (step <= most) & (step == step.round())
    if not torch.where(high == 0, step == 0, in_range).all():
        return f"a range of codes that is not between {least} and {most}"
    # Codes of blocks whose levels reach below the normal floats: most checkpoints have no such one.
    bits = high.contiguous().view(torch.int32).to(torch.int64)
    base = bits - (255 * step.to(torch.int64) >> 4)
    low = (high > 0) & (base + (step.to(torch.int64) >> 4) < code.NORMAL_BITS)
    if not low.any():
        return ""
    # A run that is beyond reproach has some, where gradients ended long ago: chunk by chunk, as
    # numbers of blocks and levels take 48 bytes an element.
    for begin in range(0, codes.numel(), _CHUNK_NUMEL):
        here = codes[begin : begin + _CHUNK_NUMEL]
        block = block_numbers(begin, begin + len(here))
        chosen = low[block] & (here != 0)
        at = block[chosen]
        level = base[at] + (here[chosen].to(torch.int64) * step[at].to(torch.int64) >> 4)
        if (level < code.NORMAL_BITS).any():
            return "a code below the smallest normal float"
    return ""
