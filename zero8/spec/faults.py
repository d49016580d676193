# SPDX-License-Identifier: Apache-2.0
"""Checks of the values of moments that come from outside, such as from a checkpoint.

Steps assume that moments decode to finite numbers, and unsigned ones to none below 0; others would
silently make weights NaN.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from zero8.spec.codec import MomentCode
from zero8.spec.fp8 import Fp8Code
from zero8.spec.log import LogCode, SignedLogCode

_CHUNK_NUMEL = 1 << 22


BlockNumbers = Callable[[int, int], Tensor]
"""Maps (begin, end) to the block of each element from begin to end - 1, int64."""


def fault(code: MomentCode, codes: Tensor, scales: Tensor, block_numbers: BlockNumbers) -> str:
    """Return the fault of a moment in words, "" if it has none.

    `codes` are (numel,) uint8, `scales` (num_blocks, *code.scale_shape) float32; `block_numbers` is
    seldom called.
    """
    if not scales.isfinite().all():
        return "a scale that is not finite"
    if (not code.signed or isinstance(code, Fp8Code)) and (scales < 0).any():
        return "a negative scale"
    if isinstance(code, LogCode):
        return _fault_of_log(code, codes, scales, block_numbers)
    if isinstance(code, SignedLogCode | Fp8Code):  # levels of others are at most 1
        largest = torch.full_like(scales, code.largest, dtype=torch.uint8)
        if not code.decode(largest, scales, 1.0).isfinite().all():
            return "a scale whose largest code is not finite"
        for chunk in codes.split(_CHUNK_NUMEL):
            counts = torch.bincount(chunk, minlength=256).tolist()
            if found := [one for one in code.unused if counts[one]]:
                return f"a code that is NaN or unused: {found[0]}"
    return ""


def fault_of_values(values: Tensor, *, is_signed: bool) -> str:
    """Return the fault of a moment in float32, of any shape, in words, "" if it has none."""
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
    least, most = code.step_of(torch.tensor([code.MIN_SPAN, code.MAX_SPAN], device="cpu")).tolist()
    in_range = (step >= least) & (step <= most) & (step == step.round())
    if not torch.where(high == 0, step == 0, in_range).all():
        return f"a range of codes that is not between {least} and {most}"
    # Blocks whose levels reach below the normal floats, which decode to 0; most checkpoints have
    # none.
    first = code.decode(torch.ones_like(high, dtype=torch.uint8), scales, 1.0)
    is_low = (high > 0) & ~(first > 0)
    if not is_low.any():
        return ""
    # A sound run has some, where gradients ended long ago.  Chunk by chunk, because block numbers
    # and levels take 48 bytes per element.
    for begin in range(0, codes.numel(), _CHUNK_NUMEL):
        here = codes[begin : begin + _CHUNK_NUMEL]
        block = block_numbers(begin, begin + len(here))
        values = code.decode(here, scales[block], 1.0)
        if (is_low[block] & (here != 0) & ~(values > 0)).any():
            return "a code below the smallest normal float"
    return ""
