# SPDX-License-Identifier: Apache-2.0
"""Codes that are places in a table of levels."""

import torch
from torch import Tensor

from zero8.spec import arithmetic as ieee


def decoded(levels: Tensor, codes: Tensor, scale: Tensor, gain: float) -> Tensor:
    """Return level(code) * (scale * gain), equation (C1), of each element; float32.

    Args:
        levels: (256,) float32, on any device.
        codes: (numel,) uint8.
        scale: (numel,) float32, that of each element's block.
        gain: what the values are multiplied by.
    """
    return ieee.mul(levels.to(codes.device)[codes.to(torch.int64)], ieee.mul(scale, gain))
