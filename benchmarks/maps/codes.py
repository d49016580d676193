# SPDX-License-Identifier: Apache-2.0
"""Both of Adam's moments in 8 bits, by a map of the paper or by zero8's `log`.

A code cuts moments into blocks, v being the moment itself.  `encode` returns the state tensors,
`decode` turns them back into (m, v), float32 [blocks, block_size].  A block size of None makes a
whole tensor one block, which the paper calls tensor-wise.

The functions in `MAPS` take a tensor scaled to [-1, 1], which only `quantile` looks at, and whether
it has negative elements (m) or not (v).  They return the values of the codes in ascending order,
float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zero8.spec import dither
from zero8.spec.codec import CODECS, MomentCode, dequantize, quantize
from zero8.spec.grid import BlockGrid
from zero8.spec.log import settling

BLOCK_SIZE = 256
BETA1 = 0.9
LOG = "log"
GRAINS = {"block": BLOCK_SIZE, "tensor": None}
"""What one scale serves."""


def linear(x: Tensor, signed: bool) -> Tensor:
    """Return i/127 for i from -127 to 127, which has 0 but one value less, or i/255 for v."""
    return torch.arange(-127, 128) / 127 if signed else torch.arange(256) / 255


def quantile(x: Tensor, signed: bool) -> Tensor:
    """Return the quantile map of a tensor's own elements.

        q_i = (Q(i/257) + Q((i+1)/257)) / 2,  i from 0 to 255

    Q is the quantile function of the elements, linear between them.
    """
    edges = torch.quantile(x.flatten(), torch.arange(257) / 257)
    return (edges[:-1] + edges[1:]) / 2


def dynamic(x: Tensor, signed: bool) -> Tensor:
    """Return the dynamic tree map, whose values zero8's `dynamic` has as well."""
    codec = CODECS["dynamic"]
    return (codec.of_signed if signed else codec.of_unsigned).levels


def blocks(x: Tensor, block_size: int | None) -> Tensor:
    """Return a tensor in blocks."""
    return x.reshape(-1, block_size or x.numel())


MAPS = {"linear": linear, "quantile": quantile, "dynamic": dynamic}
NAMES = (*MAPS, LOG)


@dataclass(frozen=True)
class MapCode:
    """The nearest value of a map, as the paper defines it, with one scale per block.

        code = argmin_j |q_j - x/scale|,  decoded = q_code * scale,  scale = max |x| of the block

    A map that depends on data is made for each tensor, of all its blocks.
    """

    levels_of: Callable[[Tensor, bool], Tensor]
    block_size: int | None = BLOCK_SIZE

    def encode(self, m: Tensor, v: Tensor, step: int) -> dict[str, Tensor]:
        """Return codes, scales and maps of both moments."""
        state = {}
        for name, x in (("m", blocks(m, self.block_size)), ("v", blocks(v, self.block_size))):
            scale = x.abs().amax(1, keepdim=True)
            normalized = x / scale.clamp(min=1e-38)
            levels = self.levels_of(normalized, name == "m")
            codes = torch.bucketize(normalized, (levels[:-1] + levels[1:]) / 2).to(torch.uint8)
            state |= {name: codes, f"{name}_scale": scale, f"{name}_levels": levels}
        return state

    def decode(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the moments."""
        m, v = (state[f"{x}_levels"][state[x].long()] * state[f"{x}_scale"] for x in "mv")
        return m, v


@dataclass(frozen=True)
class LogCode:
    """zero8's `log` as a step writes it: m settles, and v is dithered."""

    block_size: int | None = BLOCK_SIZE

    def encode(self, m: Tensor, v: Tensor, step: int) -> dict[str, Tensor]:
        """Return codes and scales of both moments; those of m are int8, so that they ascend."""
        codec, (m, v) = CODECS[LOG], (blocks(x, self.block_size) for x in (m, v))
        m_codes, m_scale = _quantized(codec.of_signed, m, step, settling(BETA1))
        v_codes, v_scale = _quantized(codec.of_unsigned, v, step)
        return {"m": m_codes.view(torch.int8), "m_scale": m_scale, "v": v_codes, "v_scale": v_scale}

    def decode(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the moments."""
        codec = CODECS[LOG]
        m = _dequantized(codec.of_signed, state["m"].view(torch.uint8), state["m_scale"])
        return m, _dequantized(codec.of_unsigned, state["v"], state["v_scale"])


def _quantized(
    code: MomentCode, x: Tensor, step: int, settling: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a moment in blocks, rounded as zero8 does at a step."""
    numel, block_size = x.numel(), x.shape[1]
    grid = BlockGrid(1, numel, block_size)
    thresholds = dither.in_blocks(dither.phase_of(0, step), 0, numel, grid)
    blocks = torch.arange(numel) // block_size
    codes, scales = quantize(code, x.reshape(-1), blocks, len(x), thresholds, settling)
    return codes.view(x.shape), scales


def _dequantized(code: MomentCode, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the moment that `_quantized` made codes and scales of."""
    blocks = torch.arange(codes.numel()) // codes.shape[1]
    return dequantize(code, codes.reshape(-1), scales, blocks).view(codes.shape)


def code_of(name: str, grain: str) -> MapCode | LogCode:
    """Return the code of a name in NAMES, with one scale per block or per tensor."""
    size = GRAINS[grain]
    return LogCode(size) if name == LOG else MapCode(MAPS[name], size)
