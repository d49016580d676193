# SPDX-License-Identifier: Apache-2.0
"""Both of Adam's moments in 8 bits, by a map of the paper or by zero8's `log`.

The codes have the interface of `benchmarks.fidelity.codes`; a block size of None makes a whole
tensor one block, which the paper calls tensor-wise.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.fidelity.codes import dequantized, nearest, quantized
from benchmarks.fidelity.training import BETA1
from benchmarks.maps.levels import MAPS
from zero8.spec.codec import CODECS
from zero8.spec.log import settling

BLOCK_SIZE = 256
LOG = "log"
GRAINS = {"block": BLOCK_SIZE, "tensor": None}
"""What one scale serves."""


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
        for name, x in (("m", m), ("v", v)):
            scale = x.abs().amax(1, keepdim=True)
            normalized = x / scale.clamp(min=1e-38)
            levels = self.levels_of(normalized, name == "m")
            codes = nearest(normalized, levels)
            state |= {name: codes, f"{name}_scale": scale, f"{name}_levels": levels}
        return state

    def decode(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the moments."""
        m, v = (state[f"{x}_levels"][state[x].long()] * state[f"{x}_scale"] for x in "mv")
        return m, v


@dataclass(frozen=True)
class LogPairCode:
    """zero8's `log` as a step writes it: m settles, and v is dithered."""

    block_size: int | None = BLOCK_SIZE

    def encode(self, m: Tensor, v: Tensor, step: int) -> dict[str, Tensor]:
        """Return codes and scales of both moments; those of m are int8, so that they ascend."""
        codec = CODECS[LOG]
        m_codes, m_scale = quantized(codec.of_signed, m, step, settling(BETA1))
        v_codes, v_scale = quantized(codec.of_unsigned, v, step)
        return {"m": m_codes.view(torch.int8), "m_scale": m_scale, "v": v_codes, "v_scale": v_scale}

    def decode(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the moments."""
        codec = CODECS[LOG]
        m = dequantized(codec.of_signed, state["m"].view(torch.uint8), state["m_scale"])
        return m, dequantized(codec.of_unsigned, state["v"], state["v_scale"])


PairCode = MapCode | LogPairCode
NAMES = (*MAPS, LOG)


def code_of(name: str, grain: str) -> PairCode:
    """Return the code of a name in NAMES, with one scale per block or per tensor."""
    size = GRAINS[grain]
    return LogPairCode(size) if name == LOG else MapCode(MAPS[name], size)


def positions(codes: Tensor) -> Tensor:
    """Return the places of codes among 256 in the order of their values, int64."""
    return codes.long() + 128 * (codes.dtype == torch.int8)
