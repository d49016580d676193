# SPDX-License-Identifier: Apache-2.0
"""Sums and extremes over the blocks of a moment."""

import torch
from torch import Tensor

from zero8.spec import arithmetic as ieee

SATURATION = 2.0**126
"""Larger magnitudes are stored as this: beyond it the reciprocal of a scale is subnormal."""


def block_absmax(x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
    """Return the largest |x| of each block, at most 2^126; shape (num_blocks,) float32."""
    magnitude = ieee.flush(x).abs().clamp(max=SATURATION)
    return magnitude.new_zeros(num_blocks).scatter_reduce(0, block, magnitude, "amax")


def place_in_block(block: Tensor, num_blocks: int) -> Tensor:
    """Return how many elements of its block lie before each element; shape (numel,) int64.

    Args:
        block: (numel,) int64, ascending.
        num_blocks: number of blocks.
    """
    index = torch.arange(block.numel(), device=block.device)
    first = torch.full((num_blocks,), block.numel(), device=block.device)
    return index - first.scatter_reduce(0, block, index, "amin")[block]
