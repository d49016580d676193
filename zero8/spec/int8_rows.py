# SPDX-License-Identifier: Apache-2.0
"""INT8 weights with one scale per row: how a step reads and writes them.

    p      = code * scale                                                                    (W1)
    limit  = max |p'|                  over the row
    scale' = scale                     where 126 scale <= limit <= 127 scale                 (W2)
             up(limit / 127)           else
    code'  = floor(p'/scale' + t),  t = (q + 1/2) (2^-16 - 2^-32)    within -127 .. 127      (W3)

p' is what the step makes of p, in float32, q a threshold of 0 .. 65535, and up(x) the least number
of 16 significant bits (8 in bfloat16) that is not below x; it is at least 2^-126, and 0 of 0.
Quotients, and the sum in (W3), are rounded to float32.  Products of codes and such scales are
exact, and the largest code of a row is 126 or 127, unless the row is as small as 2^-119.  Scales
from elsewhere may have all 24 bits; below 2^-126 they count as 0.  If any p' of a row is not
finite, neither is its scale, and its codes are 0.

A step that changes no weight of a row whose largest code is 126 or 127 changes no code and no
scale: p'/scale' is a whole number then, or one of its neighbours in float32, which the sum with t
does not carry past the next one.

Over thresholds uniform in 0..65535 the mean of code' is p'/scale' within 2^-16.  They are those of
`zero8.spec.dither`, the row taken for a block: (D2) where i0 is the index in the parameter of the
row's first element; or, hashed, lowbias32 of (D1).  To nearest, ties go to the even code.

The format is that of torchao's `Int8QuantizedTrainingLinearWeight`, which rounds with a global
generator, to scales of 24 bits; in bfloat16 it rounds its scales after it has made the codes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero8.spec import dither
from zero8.spec.arithmetic import SMALLEST_NORMAL, flush
from zero8.spec.segment import Rounding

LARGEST_CODE = 127

_SIGNIFICANT_BITS = {torch.float32: 16, torch.bfloat16: 8}
SCALE_DTYPES = tuple(_SIGNIFICANT_BITS)
_FLOAT32_BITS = 24
_THRESHOLD = 2.0**-16 - 2.0**-32

Kind = tuple[Sequence[int], torch.dtype | None]
"""The shape and dtype of a tensor, None if it is unknown."""


def are_rows(codes: Kind, scales: Kind) -> bool:
    """Return whether tensors of these shapes and dtypes are the codes and scales of rows."""
    (shape, dtype), (scales_shape, scales_dtype) = codes, scales
    are_codes = dtype == torch.int8 and len(shape) == 2
    return are_codes and scales_dtype in SCALE_DTYPES and tuple(scales_shape) == tuple(shape[:1])


def decoded(codes: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the weights of rows, equation (W1), float32; in `out` if it is given."""
    return torch.mul(codes, flush(scales.float()).unsqueeze(1), out=out)


def new_scales(weights: Tensor, scales: Tensor) -> Tensor:
    """Return the scales of rows after a step, equation (W2); `scales` are those before it."""
    before, limit = flush(scales.float()), weights.abs().amax(1)
    suffices = ((LARGEST_CODE - 1) * before <= limit) & (limit <= LARGEST_CODE * before)
    # By a tensor: for a number CUDA multiplies by its reciprocal.
    quotient = limit / torch.full_like(limit, LARGEST_CODE)
    raised = _rounded_up(quotient, _SIGNIFICANT_BITS[scales.dtype])
    raised = torch.where(limit > 0, raised.clamp_(min=SMALLEST_NORMAL), limit)
    after = torch.where(suffices, before, raised).to(scales.dtype)
    after[limit.isnan()] = torch.nan  # torch's vector code converts it to another pattern
    return after


def _rounded_up(x: Tensor, significant_bits: int) -> Tensor:
    """Return the least numbers of so many bits at or above positive float32 ones."""
    dropped = (1 << _FLOAT32_BITS - significant_bits) - 1
    return ((x.view(torch.int32) + dropped) & ~dropped).view(torch.float32)


def encoded(weights: Tensor, scales: Tensor, thresholds: Tensor | None) -> Tensor:
    """Return the codes of rows, equation (W3), int8; the nearest ones without thresholds."""
    scales = scales.float().unsqueeze(1)
    x = weights / torch.where((scales > 0) & scales.isfinite(), scales, torch.inf)
    if thresholds is None:
        x.round_()
    else:
        x.add_(thresholds.float().add_(0.5).mul_(_THRESHOLD)).floor_()
    return x.nan_to_num_(0.0).clamp_(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)


def thresholds(
    rounding: Rounding, phase: int, first: int, shape: Sequence[int], device: torch.device
) -> Tensor | None:
    """Return the thresholds q of whole rows of a parameter, int32; None to round to nearest.

    `first` is the index in the parameter of the first row's first element, `phase` that of the
    parameter's dither at this step.
    """
    rows, columns = shape
    if rounding == Rounding.NEAREST:
        return None
    if rounding == Rounding.HASH:
        of_all = dither.hashed(phase, first, rows * columns).view(shape)
        return of_all.to(torch.int32).to(device)
    starts = torch.arange(first, first + rows * columns, max(columns, 1), dtype=torch.int64)
    of_rows = ((starts & 0xFFFFFFFF) * dither.ELEMENT_STEP + phase & 0xFFFFFFFF) >> 16
    in_row = torch.arange(columns, dtype=torch.int64) * dither.IN_BLOCK_STEP & 0xFFFF
    sums = of_rows.to(device, torch.int32).unsqueeze(1) + in_row.to(device, torch.int32)
    return sums.bitwise_and_(0xFFFF)
