# SPDX-License-Identifier: Apache-2.0
"""The code of long-lived moments, (C2"): the dither rounds it, levels stay, and means are exact."""

import pytest
import torch

from zero8.spec.codec import CODECS, quantize

CODE, SETTLING = CODECS["log"].of_dithered, CODECS["log"].of_signed
LEVELS = CODE.narrow.levels[:128]
PRODUCED = torch.arange(-127, 128)
EXTREMES = [0, 1, 2, 3, 4, 0x7FFF, 0x8000, 0xFFFC, 0xFFFF]
CODES = (PRODUCED & 255).to(torch.uint8)


def decoded(scale: float) -> torch.Tensor:
    return CODE.decode(CODES, torch.full((255,), scale), 1.0)


@pytest.mark.parametrize("level", [0, 1, 31, 32, 77, 126])
@pytest.mark.parametrize("fraction", [0.0, 2.0**-14, 0.25, 0.6180339, 0.999])
def test_encode_dithered_log_mean_over_all_thresholds_is_the_exact_position(level, fraction):
    """Of 65,536 thresholds, `fraction` go up, but for the two units that q leaves out at each end,
    its steps of four units, and half a unit of the last place of y, which is 1/8 of a unit of q.
    """
    low, high = LEVELS[level : level + 2].tolist()
    x = torch.tensor(low + fraction * (high - low)).expand(65536).contiguous()
    up = CODE.encode(x, torch.ones(65536), torch.arange(65536)).int() - level
    assert up.min() >= 0 and up.max() <= 1
    assert abs(int(up.sum()) - 65536 * fraction) <= 4.125
    down = CODE.encode(-x, torch.ones(65536), torch.arange(65536)).view(torch.int8).int() + level
    assert torch.equal(down, -up)


@pytest.mark.parametrize("q", [0, 0xFFFF])
def test_quantize_dithered_log_any_threshold_keeps_the_extreme_and_the_narrow_levels(q):
    """Of all-small blocks too, for which the settling code takes the wide levels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64 * 256, generator=generator) ** 5
    block = torch.arange(64).repeat_interleave(256)
    codes, scales = quantize(CODE, x, block, 64, torch.full_like(block, q))
    wide = SETTLING.scales(x, block, 64) < 0
    assert wide.any() and (scales > 0).all()
    top = x.view(64, 256).abs().argmax(1)
    assert (codes.view(64, 256).view(torch.int8).gather(1, top[:, None]).abs() == 127).all()
    again = quantize(CODE, CODE.decode(codes, scales[block], 1.0), block, 64)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
