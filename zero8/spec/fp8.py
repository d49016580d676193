# SPDX-License-Identifier: Apache-2.0
"""The codes of `fp8`: 8-bit floats, with one scale per block."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec.levels import block_absmax, decoded


@dataclass(frozen=True)
class Fp8Code:
    """E4M3 of Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433).

    The codes are those of `torch.float8_e4m3fn`: a sign, 4 bits of exponent with bias 7, and 3 of
    mantissa, without infinities.

        n = x * (1/scale);  code = the nearest code of n, the even one in a tie             (C10)
        scale = absmax / 448, rounded to the nearest multiple of 16 units in the last place (C11)

    A scale has 20 significant bits and a code at most 4, so their product is exact.  448 is the
    largest code: a block's largest element decodes to 448 * scale, which gives the same scale
    again.  torchao's `AdamWFp8` has the same codes, and scales that are not rounded.

    A negative x that rounds to 0 has code 0, not that of -0.  An unsigned moment has no negative
    codes, and rounds up to code 1 what is not 0.  Codes 127 and 255, NaN in E4M3, are never made.

    Error: at most 2^-4 of |x|, or 2^-10 of the scale if that is more; for an unsigned moment 2^-9
    of the scale if that is more.
    """

    signed: bool

    bits = 8
    scale_shape = ()
    zero_code = 0

    TOP = 448.0
    largest = 126
    """The code of `TOP`."""

    @property
    def unused(self) -> Sequence[int]:
        """Codes that are NaN, or negative where a moment cannot be."""
        return (127, 255) if self.signed else range(127, 256)

    @property
    def min_scale(self) -> float:
        """Smaller scales are raised to it: code 1 decodes to 2^-126, the smallest normal float."""
        return 2.0**-117

    @cached_property
    def levels(self) -> Tensor:
        """(256,) float32: what codes decode to with scale 1; for 127 and 255 the next, +-480."""
        code = torch.arange(256, dtype=torch.int32, device="cpu")
        exponent, mantissa = code >> 3 & 15, code & 7
        significand = torch.where(exponent > 0, 8 + mantissa, mantissa).to(torch.float32)
        magnitude = torch.ldexp(significand, exponent.clamp(min=1) - 10)
        return torch.where(code > 127, -magnitude, magnitude)

    def scales(self, x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
        """Return the scale of each block, equation (C11); 0 for a block of zeros."""
        absmax = block_absmax(x, block, num_blocks)
        bits = ieee.div(absmax, self.TOP).view(torch.int32)
        scale = (bits + 8 & ~15).view(torch.float32)
        return torch.where(absmax == 0, 0.0, scale.clamp(min=self.min_scale))

    def decode(self, codes: Tensor, scale: Tensor, gain: float) -> Tensor:
        """Return the decoded values, times `gain`, equation (C1); float32."""
        return decoded(self.levels, codes, scale, gain)

    def encode(
        self, x: Tensor, scale: Tensor, dither: Tensor | None, settling: float | None = None
    ) -> Tensor:
        """Return the code of each element, equation (C10), uint8; ignores dither and settling."""
        inverse = torch.where(scale == 0, 0.0, ieee.div(1.0, scale))
        magnitude = ieee.mul(x.abs(), inverse).clamp(max=self.TOP)
        code = magnitude.to(torch.float8_e4m3fn).view(torch.uint8)
        if not self.signed:
            return torch.where(x > 0, code.clamp(min=1), code)
        return torch.where((x < 0) & (code > 0), code | 128, code)
