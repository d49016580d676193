# SPDX-License-Identifier: Apache-2.0
"""Codes of 12 bits for both moments: a logarithmic v, and m as a ratio to sqrt(v).

    v: code 0 is 0; code c of 1 .. top is the float whose bit pattern is high - (top - c) step
    m: code k of -top .. top is k/top times the block's largest |m|/sqrt(v), times sqrt(v)

Both codes have the interface of `benchmarks.fidelity.codes`; the codes of an element are packed
into 12 bits, and each block has 5 bytes of scales beside them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.fidelity.training import BETA1
from zero8.spec import dither

BITS = 12
# Of a block: `high` and `ratio` have two bytes each, `span` has one.
SCALE_BYTES = 5
# Units of the pattern of a float32 in an eighth of an octave; spans are made of eighths.
EIGHTH = 1 << 20
NORMAL_BITS = 0x00800000


def thresholds(x: Tensor, key: int, step: int) -> Tensor:
    """Return zero8's dither, equation (D2), for a moment in blocks: from 0 to 1, of its shape."""
    blocks, block_size = x.shape
    first = torch.arange(blocks)[:, None] * block_size * dither.ELEMENT_STEP
    start = (first + dither.phase_of(key, step) & 0xFFFFFFFF) >> 16
    offset = torch.arange(block_size, dtype=torch.int32) * dither.IN_BLOCK_STEP
    return ((start.int() + offset & 0xFFFF).float() + 0.5) / 65536


def upper_half(bits: Tensor) -> Tensor:
    """Return the upper 16 bits of the patterns of positive floats, rounded up; int16."""
    return (bits + 0xFFFF >> 16).to(torch.int16)


def from_upper_half(half: Tensor) -> Tensor:
    """Return the pattern that these upper 16 bits are of; int32."""
    return half.to(torch.int32) << 16


@dataclass(frozen=True)
class LogV:
    """v by its bit pattern between the ends of its block, dithered in time as in `log`."""

    bits: int

    MIN_SPAN, MAX_SPAN = 2 * 8, 28 * 8

    @property
    def top(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    def encode(self, v: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the codes, int32, and the scales: `high` and `span`, in eighths of an octave."""
        bits = v.view(torch.int32)
        high = upper_half(bits.amax(1, keepdim=True))
        low = torch.where(v > 0, bits, 0x7F800000).amin(1, keepdim=True)
        span = (from_upper_half(high) - low + EIGHTH - 1) // EIGHTH
        scales = {"high": high, "span": span.clamp(self.MIN_SPAN, self.MAX_SPAN).to(torch.uint8)}
        below = (from_upper_half(high) - bits).float() / self._cell(scales)
        codes = (self.top - below + thresholds(v, 1, step)).floor().clamp(1, self.top)
        return torch.where(v > 0, codes, 0.0).to(torch.int32), scales

    def decode(self, codes: Tensor, scales: dict[str, Tensor]) -> Tensor:
        """Return v."""
        below = ((self.top - codes).float() * self._cell(scales)).to(torch.int32)
        bits = (from_upper_half(scales["high"]) - below).clamp(min=NORMAL_BITS)
        return torch.where(codes > 0, bits.view(torch.float32), 0.0)

    def _cell(self, scales: dict[str, Tensor]) -> Tensor:
        return scales["span"].float() * (EIGHTH / (self.top - 1))


@dataclass(frozen=True)
class RatioM:
    """m as a linear code of r = m/sqrt(v), whose decay no rounding stops.

        x = top |r| / max |r|,   k = floor(x + 1/2 + reach(ceil(x)) (2 q - 1)),   q the dither
        reach(c) = max(0, 1/2 - c (1 - beta1)/2)

    Nearest rounding, reach 0, would hold each code that the decay by beta1 moves by less than half
    a cell: at beta1 0.9 those up to 4 or 5.  Thresholds reach less where the decay moves a code
    more; from code 10 on rounding is to nearest, which has half the mean square of the full dither.
    """

    bits: int

    @property
    def top(self) -> int:
        """The largest magnitude of a code."""
        return 2 ** (self.bits - 1) - 1

    def encode(self, m: Tensor, v: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the codes, int32 and signed, and the scales, for a decoded v."""
        ratio = torch.where(v > 0, m / v.sqrt(), 0.0)
        half = upper_half(ratio.abs().amax(1, keepdim=True).view(torch.int32))
        scale = from_upper_half(half).view(torch.float32)
        x = torch.where(scale > 0, ratio.abs() * self.top / scale, 0.0)
        reach = (0.5 - x.ceil() * ((1 - BETA1) / 2)).clamp_(min=0.0)
        k = (x + 0.5 + reach * (2 * thresholds(m, 2, step) - 1)).floor_().clamp_(max=self.top)
        return k.copysign_(ratio).int(), {"ratio": half}

    def decode(self, codes: Tensor, v: Tensor, scales: dict[str, Tensor]) -> Tensor:
        """Return m from its codes and the decoded v."""
        scale = from_upper_half(scales["ratio"]).view(torch.float32)
        return codes * (scale / self.top) * v.sqrt()


@dataclass(frozen=True)
class TwelveBitCode:
    """Both moments in 12 bits per element and 5 bytes per block."""

    m_bits: int
    block_size: int = 64

    @property
    def bytes_per_param(self) -> float:
        """The bytes of an element: its codes, and its share of the scales of its block."""
        return BITS / 8 + SCALE_BYTES / self.block_size

    @property
    def m(self) -> RatioM:
        """The code of m."""
        return RatioM(self.m_bits)

    @property
    def v(self) -> LogV:
        """The code of v."""
        return LogV(BITS - self.m_bits)

    def encode(self, m: Tensor, v: Tensor, step: int) -> dict[str, Tensor]:
        """Return packed codes and the scales of both moments; v first, as m refers to it."""
        v_codes, v_scales = self.v.encode(v, step)
        m_codes, m_scales = self.m.encode(m, self.v.decode(v_codes, v_scales), step)
        joint = v_codes << self.m_bits | m_codes + self.m.top
        return {"codes": packed(joint), **v_scales, **m_scales}

    def decode(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the moments."""
        joint = unpacked(state["codes"])
        v = self.v.decode(joint >> self.m_bits, state)
        codes = (joint & (1 << self.m_bits) - 1) - self.m.top
        return self.m.decode(codes, v, state), v


def packed(codes: Tensor) -> Tensor:
    """Return codes of 12 bits, [blocks, block_size], as three bytes for every two; uint8."""
    even, odd = codes[:, ::2], codes[:, 1::2]
    return torch.stack([even & 255, even >> 8 | odd << 4 & 255, odd >> 4], dim=2).to(torch.uint8)


def unpacked(triples: Tensor) -> Tensor:
    """Return the codes that `packed` made bytes of; int32."""
    low, middle, high = triples.int().unbind(2)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=2).flatten(1)
