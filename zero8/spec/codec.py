# SPDX-License-Identifier: Apache-2.0
"""The 8-bit formats of the two Adam moments: the written definition, in plain PyTorch.

A moment is cut into blocks (`zero8.spec.grid`); each block keeps one float32 scale, each element
one code, and an element decodes to

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
  logarithmic above: m is a sign and 8 octaves of 16 levels, nearest (but see (C2')); sqrt(v) is 8
  octaves of 32 levels, rounded by the dither of `zero8.spec.dither`.
* `log`: m as in `companded`, but 4 octaves of 32 levels in blocks whose elements are of like
  size; sqrt(v) on a logarithmic scale between the block's largest and smallest non-zero element,
  dithered, with a code of its own for 0.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zero8.spec import arithmetic as ieee

SATURATION = 2.0**126
"""Larger magnitudes are stored as this: beyond it the reciprocal of a scale is subnormal."""

HALF_BITS = 0x3F800000
"""Bit pattern of 1.0, where the companded codes start to count."""


def block_absmax(x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
    """Return the largest |x| of each block, at most 2^126; shape (num_blocks,) float32."""
    magnitude = ieee.flush(x).abs().clamp(max=SATURATION)
    return magnitude.new_zeros(num_blocks).scatter_reduce(0, block, magnitude, "amax")


@dataclass(frozen=True)
class CompandedCode:
    """Codes from the bits of y = 1 + |x|/scale: octaves of 2^mantissa_bits levels.

    code = (bits(fma(|x|, 1/scale, 1)) - bits(1) + threshold) >> (23 - mantissa_bits)        (C2)
    level(code) = float_from_bits(bits(1) + (code << (23 - mantissa_bits))) - 1              (C3)
    scale = absmax / top                                                                     (C4)

    The block's largest element decodes to top * scale, which gives the same scale again: a test
    goes through all mantissas.  `threshold` is half a cell (nearest) or the dither.  Error: at
    most half a cell (nearest) or one cell (dithered), a cell being 2^-mantissa_bits of |x| + scale.

    Steps round a first moment to nearest, but down where nearest would undo its decay:

    code = (min(bits(y) + half a cell, bits(y')) - bits(1)) >> (23 - mantissa_bits)         (C2')
    y' = fma(|x|, 1/scale * settling, 1),  settling = 1 + 0.97 (1/beta1 - 1), at most 2

    Nearest rounding holds codes that the decay by beta1 moves by less than half a cell, such as all
    below 0.5/(1 - beta1): a first moment whose gradient has ended would never reach 0 while v
    decays, and its updates would grow up to their bound.  Decayed from a code's level l * scale, y'
    is 1 + l (0.97 + 0.03 beta1) < 1 + l, so every code decays.
    """

    signed: bool
    octaves: int
    mantissa_bits: int
    square_root: bool

    scale_shape = ()

    @property
    def shift(self) -> int:
        """Number of bits of y below the code."""
        return 23 - self.mantissa_bits

    @property
    def max_code(self) -> int:
        """Largest magnitude code: the last level of the last octave."""
        return self.octaves * 2**self.mantissa_bits - 1

    @property
    def top(self) -> float:
        """Level of the largest code, such as 251 for 8 octaves of 32."""
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
        codes = torch.arange(256, dtype=torch.int32, device="cpu")
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
        return torch.where(absmax == 0, 0.0, scale.clamp(min=self.min_scale))

    def decode(self, codes: Tensor, scale: Tensor, gain: float) -> Tensor:
        """Return what codes stand for, times `gain`, equation (C1); float32."""
        return ieee.mul(self.levels.to(codes.device)[codes.to(torch.int64)], ieee.mul(scale, gain))

    def encode(
        self, x: Tensor, scale: Tensor, dither: Tensor | None, settling: float | None = None
    ) -> Tensor:
        """Return the code of each element, equation (C2); uint8.

        Args:
            x: float32, already flushed; the root of v where the code stores roots.
            scale: float32, the scale of each element's block.
            dither: unsigned 32-bit values of `zero8.spec.dither` in int64, or None for nearest.
            settling: that of (C2'), None for a moment that is not a step's.
        """
        inverse = torch.where(scale == 0, 0.0, ieee.div(1.0, scale))
        y = ieee.fma(x.abs(), inverse, 1.0)
        offset = y.view(torch.int32).to(torch.int64) - HALF_BITS
        if dither is None:
            offset = offset + (1 << (self.shift - 1))
        else:
            offset = offset + ((dither >> (32 - self.shift)) & ~15 | 8)
        if settling is not None:
            settled = ieee.fma(x.abs(), ieee.mul(inverse, settling), 1.0)
            offset = offset.minimum(settled.view(torch.int32).to(torch.int64) - HALF_BITS)
        code = (offset >> self.shift).clamp(max=self.max_code)
        if not self.signed:
            return torch.where(x > 0, code.clamp(min=1), 0).to(torch.uint8)
        negative = (x < 0) & (code > 0)
        return (code + (self.max_code + 1) * negative).to(torch.uint8)


@dataclass(frozen=True)
class AdaptiveCode:
    """One of two signed companded codes, block by block; a negative scale says that it is `wide`.

    wide:  fewer than 11/16 of the block's elements have |x| >= t,  t = narrow.decode(24, s)  (C9)

    s is the scale of the narrow code, and at least 2^-100: below, where smallest scales are near,
    blocks are narrow.  t is 1/20 of the block's largest |x|: where many are smaller, fine steps
    near 0 count for more than those near the top.

    Quantized values choose the same code again.  t is a level of the narrow code, so what is not
    below it rounds to it or above, and decodes to t or more, with the same s; steps settle down
    (C2') to levels only, and no decay rate lets settling - 1 be lost in rounding.  In the wide code
    t is 12.56, or 0.12 cells above the level 12.5: what is below t rounds to that level or lower.

    Error: that of the code that was chosen.
    """

    narrow: CompandedCode
    wide: CompandedCode

    signed = True
    square_root = False
    scale_shape = ()
    zero_code = 0

    JOINT = 24
    MIN_SCALE = 2.0**-100

    def scales(self, x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
        """Return the scale of each block, equations (C4) and (C9); 0 for a block of zeros."""
        narrow = self.narrow.scales(x, block, num_blocks)
        joint = ieee.mul(self.narrow.levels[self.JOINT], narrow)
        large = torch.bincount(block[x.abs() >= joint[block]], minlength=num_blocks)
        numel = torch.bincount(block, minlength=num_blocks)
        is_wide = (16 * large < 11 * numel) & (narrow >= self.MIN_SCALE)
        return torch.where(is_wide, -self.wide.scales(x, block, num_blocks), narrow)

    def decode(self, codes: Tensor, scale: Tensor, gain: float) -> Tensor:
        """Return what codes stand for, times `gain`, equation (C1); float32."""
        narrow = self.narrow.decode(codes, scale, gain)
        return torch.where(scale < 0, self.wide.decode(codes, -scale, gain), narrow)

    def encode(
        self, x: Tensor, scale: Tensor, dither: Tensor | None, settling: float | None = None
    ) -> Tensor:
        """Return the code of each element, equation (C2), see `CompandedCode.encode`; uint8.

        First moments are not dithered, and the choice of the code counts on that.
        """
        narrow = self.narrow.encode(x, scale, None, settling)
        return torch.where(scale < 0, self.wide.encode(x, -scale, None, settling), narrow)


@dataclass(frozen=True)
class DynamicCode:
    """The nearest entry of the paper's dynamic tree map; a tie goes to the larger entry.

    n = x * (1/scale);  code = number of thresholds <= n                                     (C5)
    scale = the block's element of largest magnitude, with its sign                          (C6)

    Error: at most half the gap around n, times |scale|; the largest gap is 0.0141 (m) or 0.0070
    (v).
    """

    signed: bool
    square_root: bool = False

    scale_shape = ()

    @property
    def min_scale(self) -> float:
        """Scales below this are raised to it: the smallest entry stays a normal float32.

        No normal float32 is nearest to 0 under it.
        """
        return 2.0**-105 if self.signed else 2.0**-104

    @cached_property
    def levels(self) -> Tensor:
        """(256,) float32, ascending: the map, equal to bitsandbytes' `create_dynamic_map`."""
        # Seven decades; decade i is divided into 2^i (signed) or 2^(i+1) cells whose midpoints
        # are the entries.  0 and 1 complete the 256.
        f32 = {"dtype": torch.float32, "device": "cpu"}
        entries = [torch.tensor([0.0, 1.0], **f32)]
        for decade in range(7):
            edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not self.signed)) + 1, **f32)
            midpoints = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)
            entries += [midpoints, -midpoints] if self.signed else [midpoints]
        return torch.cat(entries).sort().values

    @cached_property
    def thresholds(self) -> Tensor:
        """(255,) float32: the smallest float whose nearest entry is number i + 1."""
        wide = self.levels.to(torch.float64)
        middle = (wide[:-1] + wide[1:]) / 2
        rounded = middle.to(torch.float32)
        above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
        return torch.where(rounded.to(torch.float64) >= middle, rounded, above)

    @property
    def zero_code(self) -> int:
        """The code of exact zero: 127 (m) or 0 (v)."""
        return int((self.levels == 0).int().argmax())

    def scales(self, x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
        """Return the scale of each block, equation (C6); 0 for a block of zeros."""
        absmax = block_absmax(x, block, num_blocks)
        largest = block_absmax(x.clamp(min=0.0), block, num_blocks)
        sign = torch.where(largest == absmax, 1.0, -1.0)
        scale = torch.where(absmax < self.min_scale, self.min_scale, sign * absmax)
        return torch.where(absmax == 0, 0.0, scale)

    def decode(self, codes: Tensor, scale: Tensor, gain: float) -> Tensor:
        """Return what codes stand for, times `gain`, equation (C1); float32."""
        return ieee.mul(self.levels.to(codes.device)[codes.to(torch.int64)], ieee.mul(scale, gain))

    def encode(
        self, x: Tensor, scale: Tensor, dither: Tensor | None, settling: float | None = None
    ) -> Tensor:
        """Return the code of each element, equation (C5); uint8.  The last two are not used."""
        inverse = torch.where(scale == 0, 0.0, ieee.div(1.0, scale))
        normalized = ieee.mul(x, inverse)
        code = torch.searchsorted(self.thresholds.to(x.device), normalized, right=True)
        if not self.signed:
            code = torch.where(x > 0, code.clamp(min=1), code)
        return code.to(torch.uint8)


@dataclass(frozen=True)
class LogCode:
    """The root of v by the bit pattern of the float, a piecewise linear logarithm.

    The block stores its largest element `high` and a `step`; with bits(x) the pattern of x,

    x(code) = float_from_bits(max(bits(high) - round(code * step), bits(2^-63)))             (C7)
    code = (position + threshold) >> 16,  position = trunc((bits(high) - bits(x)) * 65536/step)
    step = span/254,  span = bits(high) - bits(smallest non-zero), from 1 to 14 octaves      (C8)

    for codes 0..254, but none that decodes below 2^-63, and 255 for exact zero.  The decoded
    span gives the same step again: a test goes through all spans.  Thresholds stay 16/65536 of a
    cell clear of both ends; decoded values, and the smallest element, are within 5/65536 of their
    code, so they never move.

    Error: one cell (dithered) or half a cell (nearest).  A cell is `step` in units of the last
    place, so at most step * 2^-23 of the value: 0.39 % where the block spans 1 octave, 3.1 % for 8,
    5.5 % for 14.  Elements more than 14 octaves below `high` are raised to there: 8 bits of first
    moment reach 13 octaves down, and weights whose gradient has ended would take codes from others.
    """

    square_root = True
    signed = False
    scale_shape = (2,)
    zero_code = 255

    MIN_SPAN = 1 << 23
    MAX_SPAN = 14 << 23
    MIN_BITS = (127 - 63) << 23  # of 2^-63, whose square is the smallest normal float

    def scales(self, x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
        """Return (high, step) of each block, equation (C8), 0 for a block of zeros.

        Shape (num_blocks, 2) float32.
        """
        bits = x.view(torch.int32)
        high = bits.new_zeros(num_blocks).scatter_reduce(0, block, bits, "amax")
        nonzero = torch.where(x > 0, bits, torch.iinfo(torch.int32).max)
        low = torch.full_like(high, torch.iinfo(torch.int32).max)
        low = low.scatter_reduce(0, block, nonzero, "amin")
        span = (high - low).clamp(self.MIN_SPAN, self.MAX_SPAN)
        step = ieee.div(span.to(torch.float32), 254.0)
        scales = torch.stack([high.view(torch.float32), step], dim=1)
        return torch.where((high == 0)[:, None], 0.0, scales)

    def decode(self, codes: Tensor, scale: Tensor, gain: float) -> Tensor:
        """Return the roots that codes stand for, times `gain`, equation (C7); float32."""
        high, step = scale[..., 0], scale[..., 1]
        offset = ieee.mul(codes.to(torch.float32), step).round().to(torch.int32)
        bits = (high.view(torch.int32) - offset).clamp(min=self.MIN_BITS)
        root = torch.where(codes == self.zero_code, 0.0, bits.view(torch.float32))
        return ieee.mul(root, gain)

    def encode(
        self, x: Tensor, scale: Tensor, dither: Tensor | None, settling: float | None = None
    ) -> Tensor:
        """Return the code of each element, equation (C8); uint8.

        Args:
            x: float32, roots of v, already flushed.
            scale: (numel, 2) float32, the scales of each element's block.
            dither: unsigned 32-bit values of `zero8.spec.dither` in int64, or None for nearest.
            settling: not used.
        """
        high, step = scale[..., 0].contiguous(), scale[..., 1]
        inverse = torch.where(step == 0, 0.0, ieee.div(65536.0, step))
        distance = (high.view(torch.int32) - x.view(torch.int32)).to(torch.float32)
        position = ieee.mul(distance, inverse).to(torch.int64)
        threshold = 1 << 15 if dither is None else (dither >> 16) & ~31 | 16
        room = (high.view(torch.int32) - self.MIN_BITS).clamp(max=self.MAX_SPAN)
        last = (ieee.mul(room.to(torch.float32), inverse).to(torch.int64) + 8) >> 16
        code = ((position + threshold) >> 16).minimum(last.clamp(max=254))
        return torch.where(x > 0, code, self.zero_code).to(torch.uint8)


MomentCode = CompandedCode | AdaptiveCode | DynamicCode | LogCode


@dataclass(frozen=True)
class Codec:
    """The pair of codes for the two moments, and the number that kernels and files know it by."""

    name: str
    number: int
    exp_avg: MomentCode
    exp_avg_sq: MomentCode


WIDE = CompandedCode(True, 8, 4, False)
CODECS = {
    codec.name: codec
    for codec in (
        Codec("dynamic", 1, DynamicCode(signed=True), DynamicCode(signed=False)),
        Codec("companded", 2, WIDE, CompandedCode(False, 8, 5, True)),
        Codec("log", 3, AdaptiveCode(CompandedCode(True, 4, 5, False), WIDE), LogCode()),
    )
}
DEFAULT_CODEC = "log"


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
    code: MomentCode,
    x: Tensor,
    block: Tensor,
    num_blocks: int,
    dither: Tensor | None = None,
    settling: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize a moment block by block to 8-bit codes.

    Args:
        code: the code of this moment.
        x: (numel,) float32, finite; the moment itself (v, not its root).
        block: (numel,) int64, the block of each element, from 0.
        num_blocks: number of blocks.
        dither: (numel,) int64 of `zero8.spec.dither.dithered`, or None to round to nearest.
        settling: of a step's first moment, which has to be able to decay to 0: see (C2').

    Returns:
        codes: (numel,) uint8.  scales: (num_blocks, *code.scale_shape) float32.
    """
    x = ieee.flush(x)
    if code.square_root:
        x = ieee.sqrt(x)
    scales = code.scales(x, block, num_blocks)
    return code.encode(x, scales[block], dither, settling), scales


def dequantize(
    code: MomentCode, codes: Tensor, scales: Tensor, block: Tensor, gain: float = 1.0
) -> Tensor:
    """Return the moment that `codes` stand for, times `gain`; squared where they are roots.

    With the decay rate (or its root) as gain this is the first term of Adam's moving average.

    Returns: (numel,) float32.
    """
    x = code.decode(codes, scales[block], gain)
    return ieee.mul(x, x) if code.square_root else x
