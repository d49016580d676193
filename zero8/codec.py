# SPDX-License-Identifier: Apache-2.0
"""The 8-bit formats of the two Adam moments: the written definition, in plain PyTorch.

A moment is cut into blocks (`zero8.grid`); each block keeps one float32 scale, each element one
code, and an element decodes to

    x = levels[code] * scale            rounded once                                         (C1)

(for a moment stored as its square root, x is the root).  Two rules hold for every codec:

* quantize is idempotent: for all codes and scales that quantize can produce,
  `quantize(dequantize(codes, scales))` returns them, scales included;
* zero means zero: an element decodes to 0 exactly when its float32 value was 0, except that a
  first moment may round to 0; a second moment v > 0 is never stored as 0.

Codecs:

* `dynamic`: the dynamic tree maps of Dettmers et al., "8-bit Optimizers via Block-wise
  Quantization" (arXiv:2110.02861, section 2.1), signed for m, unsigned for v; nearest code.  The
  scale of m is the block's extreme element with its sign, so that the extreme decodes exactly
  (the signed map ends at -0.993 and +1).
* `companded`: codes read off the bit pattern of y = 1 + |x|/scale, which is linear near 0 and
  logarithmic above: m is a sign and 8 octaves of 16 levels, nearest; sqrt(v) is 8 octaves of 32
  levels, rounded by the dither of `zero8.dither`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zero8 import arithmetic as ieee

SATURATION = 2.0**126
"""Larger magnitudes are stored as this: beyond it the reciprocal of a scale is subnormal."""

HALF_BITS = 0x3F800000
"""Bit pattern of 1.0, where the companded codes start to count."""


def block_absmax(x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
    """Return the largest |x| of each block, at most 2^126; shape (num_blocks,) float32."""
    magnitude = ieee.flush(x).abs().clamp(max=SATURATION)
    return torch.zeros(num_blocks).scatter_reduce(0, block, magnitude, "amax")


@dataclass(frozen=True)
class CompandedCode:
    """Codes from the bits of y = 1 + |x|/scale: 8 octaves of 2^mantissa_bits levels.

    code = (bits(fma(|x|, 1/scale, 1)) - bits(1) + threshold) >> (23 - mantissa_bits)        (C2)
    level(code) = float_from_bits(bits(1) + (code << (23 - mantissa_bits))) - 1              (C3)
    scale = absmax / top, moved by at most one ulp so that the block's largest element decodes to
    a value that gives the same scale again                                                  (C4)

    `threshold` is half a cell (nearest) or the dither.  Error: at most half a cell (nearest) or
    one cell (dithered), a cell being 2^-mantissa_bits of |x| + scale.  Thresholds stay 8 units
    clear of both ends of the cell; y of a decoded value is within 5 ulps of its code, so decoded
    values never move, whatever the dither.
    """

    signed: bool
    mantissa_bits: int
    square_root: bool

    @property
    def shift(self) -> int:
        """Number of bits of y below the code."""
        return 23 - self.mantissa_bits

    @property
    def max_code(self) -> int:
        """Largest magnitude code: the last level of the eighth octave."""
        return 8 * 2**self.mantissa_bits - 1

    @property
    def top(self) -> float:
        """Level of the largest code: 247 for m, 251 for sqrt(v)."""
        return float(self.levels[self.max_code])

    @property
    def min_scale(self) -> float:
        """Scales below this are raised to it, so that code 1 decodes to a normal float32.

        Where the square is what Adam needs (sqrt(v)), the square of code 1 is normal too.
        """
        return (2.0**-63 if self.square_root else 2.0**-126) * 2**self.mantissa_bits

    @cached_property
    def levels(self) -> Tensor:
        """(256,) float32: what each code decodes to at scale 1, equation (C3)."""
        codes = torch.arange(256, dtype=torch.int32)
        magnitude = codes & self.max_code
        level = ((magnitude << self.shift) + HALF_BITS).view(torch.float32) - 1.0
        return torch.where(codes > self.max_code, -level, level)

    @property
    def zero_code(self) -> int:
        """The code of exact zero."""
        return 0

    def scales(self, x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
        """Return the scale of each block, equation (C4); 0 for a block of zeros."""
        absmax = block_absmax(x, block, num_blocks)
        scale = ieee.div(absmax, self.top)
        scale = ieee.div(ieee.mul(scale, self.top), self.top)
        return torch.where(absmax == 0, 0.0, scale.clamp(min=self.min_scale))

    def encode(self, x: Tensor, scale: Tensor, dither: Tensor | None) -> Tensor:
        """Return the code of each element, equation (C2); uint8.

        Args:
            x: float32, already flushed; the root of v where the code stores roots.
            scale: float32, the scale of each element's block.
            dither: unsigned 32-bit values of `zero8.dither` in int64, or None for nearest.
        """
        inverse = torch.where(scale == 0, 0.0, ieee.div(1.0, scale))
        y = ieee.fma(x.abs(), inverse, 1.0)
        offset = y.view(torch.int32).to(torch.int64) - HALF_BITS
        if dither is None:
            threshold = torch.tensor(1 << (self.shift - 1))
        else:
            threshold = (dither >> (32 - self.shift)) & ~15 | 8
        code = ((offset + threshold) >> self.shift).clamp(max=self.max_code)
        if not self.signed:
            return torch.where(x > 0, code.clamp(min=1), 0).to(torch.uint8)
        negative = (x < 0) & (code > 0)
        return (code + (self.max_code + 1) * negative).to(torch.uint8)


@dataclass(frozen=True)
class DynamicCode:
    """The nearest entry of the paper's dynamic tree map; a tie goes to the larger entry.

    n = x * (1/scale);  code = number of thresholds <= n                                     (C5)
    scale = the block's element of largest magnitude, with its sign                          (C6)

    Error: at most half the gap around n, times |scale|; the largest gap is 0.0141 (m) or 0.0070
    (v), relative gaps are at most 1/3 above the smallest entry.
    """

    signed: bool
    square_root: bool = False

    MIN_SCALE = 2.0**-104
    """Scales below this are raised to it: the smallest entry, 3.25e-7, stays a normal float32."""

    @cached_property
    def levels(self) -> Tensor:
        """(256,) float32, ascending: the map, equal to bitsandbytes' `create_dynamic_map`."""
        # Seven decades; decade i is divided into 2^i (signed) or 2^(i+1) cells whose midpoints
        # are the entries.  0 and 1 complete the 256.
        entries = [torch.tensor([0.0, 1.0])]
        for decade in range(7):
            edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not self.signed)) + 1)
            midpoints = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)
            entries += [midpoints, -midpoints] if self.signed else [midpoints]
        return torch.cat(entries).sort().values

    @cached_property
    def thresholds(self) -> Tensor:
        """(255,) float32: the smallest float whose nearest entry is number i + 1."""
        wide = self.levels.to(torch.float64)
        middle = (wide[:-1] + wide[1:]) / 2
        rounded = middle.to(torch.float32)
        above = torch.nextafter(rounded, torch.tensor(float("inf")))
        return torch.where(rounded.to(torch.float64) >= middle, rounded, above)

    @property
    def zero_code(self) -> int:
        """The code of exact zero: 127 (m) or 0 (v)."""
        return int((self.levels == 0).nonzero())

    def scales(self, x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
        """Return the scale of each block, equation (C6); 0 for a block of zeros."""
        absmax = block_absmax(x, block, num_blocks)
        largest = block_absmax(x.clamp(min=0.0), block, num_blocks)
        sign = torch.where(largest == absmax, 1.0, -1.0)
        scale = torch.where(absmax < self.MIN_SCALE, self.MIN_SCALE, sign * absmax)
        return torch.where(absmax == 0, 0.0, scale)

    def encode(self, x: Tensor, scale: Tensor, dither: Tensor | None) -> Tensor:
        """Return the code of each element, equation (C5); uint8.  `dither` is not used."""
        inverse = torch.where(scale == 0, 0.0, ieee.div(1.0, scale))
        normalized = ieee.mul(x, inverse)
        code = torch.searchsorted(self.thresholds, normalized, right=True)
        if not self.signed:
            code = torch.where(x > 0, code.clamp(min=1), code)
        return code.to(torch.uint8)


MomentCode = CompandedCode | DynamicCode


@dataclass(frozen=True)
class Codec:
    """The pair of codes for the two moments, and the number that kernels and files know it by."""

    name: str
    number: int
    exp_avg: MomentCode
    exp_avg_sq: MomentCode


CODECS = {
    codec.name: codec
    for codec in (
        Codec("dynamic", 1, DynamicCode(signed=True), DynamicCode(signed=False)),
        Codec(
            "companded",
            2,
            CompandedCode(signed=True, mantissa_bits=4, square_root=False),
            CompandedCode(signed=False, mantissa_bits=5, square_root=True),
        ),
    )
}
DEFAULT_CODEC = "companded"


def codec_named(name: str) -> Codec:
    """Return the codec called `name`, or raise ValueError with the names there are."""
    if name not in CODECS:
        raise ValueError(f"codec: got {name!r}, expected one of {sorted(CODECS)}")
    return CODECS[name]


def codec_numbered(number: int) -> Codec:
    """Return the codec that files call `number`, or raise ValueError."""
    for codec in CODECS.values():
        if codec.number == number:
            return codec
    raise ValueError(
        f"codec number {number} is unknown to this version of zero8; it reads "
        f"{sorted((c.number, c.name) for c in CODECS.values())}"
    )


def quantize(
    code: MomentCode, x: Tensor, block: Tensor, num_blocks: int, dither: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize a moment block by block to 8-bit codes.

    Args:
        code: the code of this moment.
        x: (numel,) float32, finite; the moment itself (v, not its root).
        block: (numel,) int64, the block of each element, from 0.
        num_blocks: number of blocks.
        dither: (numel,) int64 of `zero8.dither.dithered`, or None to round to nearest.

    Returns:
        codes: (numel,) uint8.  scales: (num_blocks,) float32.
    """
    x = ieee.flush(x)
    if code.square_root:
        x = ieee.sqrt(x)
    scales = code.scales(x, block, num_blocks)
    return code.encode(x, scales[block], dither), scales


def dequantize(
    code: MomentCode, codes: Tensor, scales: Tensor, block: Tensor, gain: float = 1.0
) -> Tensor:
    """Return the moment that `codes` stand for, times `gain` folded into the scales.

    x = levels[code] * (scale * gain), squared where the code stores roots; each operation rounds
    once.  With the decay rate as gain this is the first term of Adam's moving average.

    Returns: (numel,) float32.
    """
    x = ieee.mul(code.levels[codes.to(torch.int64)], ieee.mul(scales, gain)[block])
    return ieee.mul(x, x) if code.square_root else x
