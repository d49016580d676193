# SPDX-License-Identifier: Apache-2.0
"""Codes that are read but no longer written: those of `log` in states of format 1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec.log import SignedLogCode


@dataclass(frozen=True)
class SignMagnitudeLogCode:
    """The levels of `SignedLogCode`, with the sign in the top bit of the code."""

    signed = True
    bits = 8
    scale_shape = ()
    zero_code = 0

    def decode(self, codes: Tensor, scale: Tensor, gain: float) -> Tensor:
        """Return the decoded values, times `gain`; float32."""
        magnitude, is_negative = codes & 127, codes > 127
        signed = torch.where(is_negative, -magnitude.to(torch.int8), magnitude.to(torch.int8))
        return SignedLogCode().decode(signed.view(torch.uint8), scale, gain)


@dataclass(frozen=True)
class LogRootCode:
    """v by the bit pattern of its root, counted down from the block's largest root `high`.

    x(code) = float_from_bits(max(bits(high) - round(code * step), bits(2^-63)))^2

    for codes 0 to 254, and 0 for 255; high and step are the block's two scales.
    """

    signed = False
    bits = 8
    scale_shape = (2,)
    zero_code = 255

    MIN_BITS = (127 - 63) << 23

    def decode(self, codes: Tensor, scale: Tensor, gain: float) -> Tensor:
        """Return the decoded values, times `gain`; float32."""
        offset = ieee.mul(codes.to(torch.float32), scale[..., 1]).round().to(torch.int32)
        high = scale[..., 0].contiguous().view(torch.int32)
        root = (high - offset).clamp(min=self.MIN_BITS).view(torch.float32)
        root = torch.where(codes == self.zero_code, 0.0, root)
        return ieee.mul(ieee.mul(root, root), gain)
