# SPDX-License-Identifier: Apache-2.0
"""First moments of which it is hard to say whether their blocks are narrow or wide."""

import torch


def near_joint(largest: torch.Tensor, numel: int, seed: int) -> torch.Tensor:
    """Blocks whose other elements lie around the joint of narrow and wide, about 11/16 above it.

    Within ulps of it, within cells of both sets of levels, and farther, of either sign.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = len(largest), numel
    distance = torch.exp2(-24 * torch.rand(shape, generator=generator)).clamp(max=0.9)
    above = torch.rand(shape, generator=generator) < 11 / 16
    sign = torch.where(torch.rand(shape, generator=generator) < 0.5, 1.0, -1.0)
    x = largest[:, None] * (0.75 / 14.75) * torch.where(above, 1 + distance, 1 - distance) * sign
    x[:, 0] = largest
    return x.flatten()
