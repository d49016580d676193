# SPDX-License-Identifier: Apache-2.0
"""Moments that the kernel encodes and decodes without a step, against the specification."""

import pytest
import torch

from zero8.op import kernel
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, dequantize, quantize
from zero8.spec.grid import BlockGrid
from zero8.spec.lion import LION
from zero8.spec.packing import packed
from zero8.state import store

SHAPE, BLOCK_SIZE = (61, 1030), 256  # rows end with a ragged block
EDGES = (0.0, -0.0, 1e-45, 2.0**-127, 2.0**-126, 2.0**-100, 1.0, 2.0**125, 2.0**126, 3.4e38)
RULES = {"m": ADAM.moments[0], "v": ADAM.moments[1], "dithered": LION.moments[0]}


def values_of(rule, grid, code):
    """Return rows of values: edges, powers of two, normal ones at many scales, decoded ones."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SHAPE, generator=generator)
    x *= torch.exp2(torch.randint(-130, 120, (SHAPE[0], 1), generator=generator).float())
    x[:20] *= torch.exp2(torch.randint(-12, 1, (20, SHAPE[1]), generator=generator).float())
    x[20] = torch.tensor(EDGES).repeat(SHAPE[1] // len(EDGES))
    x[21] = torch.exp2(torch.arange(SHAPE[1]) % 250 - 125.0)
    x = (x if rule.is_signed else x.abs()).flatten()
    if rule.is_signed:
        x[::3] *= -1
    block, count = grid.block_numbers(0, len(x))
    codes, scales = quantize(code, x, block, count)
    decoded = dequantize(code, codes, scales, block)
    half = len(x) // 2
    return torch.cat([x[:half], decoded[half:]]), block, count


@pytest.mark.parametrize("isa", [*kernel.isas(), "in PyTorch"])
@pytest.mark.parametrize("which", RULES)
@pytest.mark.parametrize("codec", CODECS)
def test_moments_written_and_read_equal_the_specification_in_every_bit(
    codec, which, isa, monkeypatch
):
    read, write = store._dequantized, store._quantized
    if isa in kernel.isas():
        monkeypatch.setenv("ZERO8_ISA", isa)
        read, write = kernel.read_moment, kernel.write_moment
    rule, grid = RULES[which], BlockGrid.of(SHAPE, BLOCK_SIZE)
    code = CODECS[codec].code_of(rule)
    x, block, count = values_of(rule, grid, code)
    codes, scales = quantize(code, x, block, count)
    expected = packed(codes, grid, 0, code.bits)
    buffers = torch.empty_like(expected), torch.empty_like(scales)
    coded = kernel.CodedMoment(rule, *buffers, CODECS[codec], grid, 0)
    write(coded, x)
    assert torch.equal(coded.codes, expected)
    assert torch.equal(coded.scales, scales)
    decoded = torch.empty_like(x)
    read(coded, decoded)
    assert torch.equal(decoded, dequantize(code, codes, scales, block))
