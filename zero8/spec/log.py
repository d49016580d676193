# SPDX-License-Identifier: Apache-2.0
"""The codes of `log`, the default, and `log6`: levels at equal distances in bit patterns.

The pattern of a positive float, read as an integer, is a piecewise linear logarithm of it, with
2^23 units to an octave.  No code needs a table, a logarithm or an exponential.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec.levels import block_absmax

ONE_BITS = 0x3F800000
"""Bit pattern of 1.0, from which the levels of first moments count."""


def place_in_block(block: Tensor, num_blocks: int) -> Tensor:
    """Return how many elements of its block lie before each element, (numel,) int64."""
    index = torch.arange(block.numel(), device=block.device)
    first = torch.full((num_blocks,), block.numel(), device=block.device)
    return index - first.scatter_reduce(0, block, index, "amin")[block]


@lru_cache
def settling(beta: float) -> float:
    """Return the settling of equation (C2') for a moment that each step multiplies by `beta`."""
    # At least 2^-20, so that its float32 value exceeds 1.
    return 1 + max(2.0**-20, 0.97 * min(1.0, 1 / beta - 1 if beta else 1.0))


@dataclass(frozen=True)
class Octaves:
    """Levels of magnitude: linear near 0, and above octaves of 2^mantissa_bits levels each.

        k = (bits(fma(|x|, 1/scale, 1)) - bits(1) + half a cell) >> (23 - mantissa_bits)     (C2)
        level(k) = float_from_bits(bits(1) + (k << (23 - mantissa_bits))) - 1                (C3)
        scale = absmax / top,  top = level(largest)                                          (C4)

    The block's largest element decodes to top * scale, which gives the same scale again (a test
    covers all mantissas).  Error: at most half a cell, which is 2^-mantissa_bits of |x| + scale.

    Steps round to nearest, except down where nearest would undo a moment's decay:

        k = (min(bits(y) + half a cell, bits(y')) - bits(1)) >> (23 - mantissa_bits)        (C2')
        y' = fma(|x|, 1/scale * settling, 1),  settling = 1 + 0.97 (1/beta - 1), at most 2

    Nearest rounding holds codes that the decay by beta moves by less than half a cell, such as all
    below 0.5/(1 - beta): a first moment whose gradient has ended would never reach 0 while v
    decays, and its updates would grow up to their bound.  Decayed from a code's level l * scale, y'
    is 1 + l (0.97 + 0.03 beta) < 1 + l, so every code decays.

    That costs up to a cell at every step, which a moment of long memory adds up.  Such moments, and
    all whose settling is below `least_settling`, are rounded by the dither, unbiased, and decay as
    they should:

        k = (bits(y) + (q << (7 - mantissa_bits)) - bits(1)) >> (23 - mantissa_bits)        (C2")

    with q of equation (D2), its last two bits replaced by 2.  So q is 2 to 65534 units of 2^-16
    cells, and a level, which (C2) meets within 3 units of the last place, gives its own code for
    every q.  A moment that moves by less than 2^-15 of a cell in a step, which is beta above
    0.99997 at level 1, can stop.

    `largest` is the largest k, 127 for codes of 8 bits.
    """

    mantissa_bits: int
    largest: int

    @property
    def shift(self) -> int:
        """Number of bits of y below those of k."""
        return 23 - self.mantissa_bits

    @property
    def top(self) -> float:
        """The largest level, such as 247 for 8 octaves of 16."""
        return float(self.levels[self.largest])

    @property
    def least_settling(self) -> float:
        """The settling, a float32 value, below which (C2") errs less than (C2').

        (C2') rounds x up only to levels within (settling - 1) |x| of it: to nearest as long as that
        is half a cell.  With this settling it is so from 0.75 s on, all but 1 to 1.5 s, which are
        11/16 of a narrow block by (C9).  A larger beta holds down these, too.

        Where (C2') errs by -b cells in the mean, an average with beta has b beta/(1 - beta) of
        them, as all steps err alike, beside the beta/(12 (1 - beta^2))^1/2 of rounding to nearest.
        The dither has 2^1/2 of the latter, or less, as its errors cancel in part.  So it wins where

            b > ((1 - beta)/(12 (1 + beta)))^1/2

        which is 0.03 cells of 8 bits, 0.06 of 6: nearly everywhere where values are held down.  The
        limits are betas of 0.9790 and 0.9209.
        """
        return float(torch.tensor(1 + 2 / 3 / 2**self.mantissa_bits, dtype=torch.float32))

    @property
    def min_scale(self) -> float:
        """Scales below this are raised to it, so that level(1) * scale is a normal float32."""
        return 2.0**-126 * 2.0**self.mantissa_bits

    @cached_property
    def levels(self) -> Tensor:
        """(largest + 2,) float32: equation (C3) for all magnitudes of integers of a code's bits."""
        magnitude = torch.arange(self.largest + 2, dtype=torch.int32, device="cpu")
        return ((magnitude << self.shift) + ONE_BITS).view(torch.float32) - 1.0

    def scales(self, absmax: Tensor) -> Tensor:
        """Return the scale of each block, equation (C4); 0 for a block of zeros."""
        scale = ieee.div(absmax, self.top)
        return torch.where(absmax == 0, 0.0, scale.clamp(min=self.min_scale))

    def magnitudes(
        self, x: Tensor, scale: Tensor, settling: float | None, dither: Tensor | None = None
    ) -> Tensor:
        """Return k of each element, int64: (C2), with `settling` (C2'), with `dither` (C2")."""
        inverse = torch.where(scale == 0, 0.0, ieee.div(1.0, scale))
        y = ieee.fma(x.abs(), inverse, 1.0)
        raised: int | Tensor = 1 << (self.shift - 1)
        if dither is not None:
            raised = (dither & ~3 | 2) << (self.shift - 16)
        offset = y.view(torch.int32).to(torch.int64) - ONE_BITS + raised
        if settling is not None:
            settled = ieee.fma(x.abs(), ieee.mul(inverse, settling), 1.0)
            offset = offset.minimum(settled.view(torch.int32).to(torch.int64) - ONE_BITS)
        return (offset >> self.shift).clamp(max=self.largest)


@dataclass(frozen=True)
class SignedLogCode:
    """A sign and a magnitude among one of two sets of levels, block by block.

    A code is an integer from -largest to largest, 127 or 31, in two's complement of its bits, and
    decodes to

        x = sign(code) * level(|code|) * scale                                               (C1)

    The levels are 4 octaves of 32, or, where the stored scale is negative, `wide`, 8 octaves of 16;
    with 6 bits 4 octaves of 8, or 8 of 4:

        wide:  fewer than 11/16 of the sampled elements have |x| >= t,  t = 0.75 s           (C9)

    s is the scale of the narrow levels; blocks with s below 2^-100, near the smallest scales, are
    narrow.  The sampled elements are those whose place in the block, or in a shard's part of it, is
    below 32 modulo 128.  t is 1/20 of the block's largest |x|, with 6 bits 1/19: where many are
    smaller, fine steps near 0 count for more than those near the top.

    Steps round by (C2') or, with a settling below `least_settling` of the narrow levels, by (C2").
    Moments that always live long have a code `is_dithered`, which never chooses the wide levels and
    rounds by (C2") in all steps.

    Quantized values choose the same levels again, whichever elements are sampled.  t is a narrow
    level, so values of at least t round to it or above, and decode to t or more, with the same s;
    steps settle down (C2') to levels only, and no decay rate lets settling - 1 be lost in rounding.
    Among the wide levels t is 12.56, or 0.12 cells above 12.5: values below t round to that level
    or lower.  With 6 bits t is 11.95, or 0.47 cells above 11.  The dither may round them up to t,
    so values that one set alone holds exactly keep that one (`kept`).

    Error: that of the chosen levels; dithered, twice as much.
    """

    bits: int = 8
    is_dithered: bool = False

    signed = True
    scale_shape = ()
    zero_code = 0

    MIN_SCALE = 2.0**-100
    SAMPLE, SAMPLE_OF = 32, 128

    @property
    def largest(self) -> int:
        """The largest code."""
        return (1 << self.bits - 1) - 1

    @property
    def unused(self) -> Sequence[int]:
        """The code that would be less than -largest."""
        return (self.largest + 1,)

    @cached_property
    def narrow(self) -> Octaves:
        """The levels of 4 octaves."""
        return Octaves(self.bits - 3, self.largest)

    @cached_property
    def wide(self) -> Octaves:
        """The levels of 8 octaves."""
        return Octaves(self.bits - 4, self.largest)

    @property
    def joint(self) -> int:
        """The narrow code whose level is 0.75, t over s."""
        return 3 << self.narrow.mantissa_bits - 2

    def scales(self, x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
        """Return the scale of each block, equations (C4) and (C9); 0 for a block of zeros."""
        absmax = block_absmax(x, block, num_blocks)
        narrow = self.narrow.scales(absmax)
        if self.is_dithered:
            return narrow
        joint = ieee.mul(self.narrow.levels[self.joint], narrow)
        sampled = place_in_block(block, num_blocks) % self.SAMPLE_OF < self.SAMPLE
        large = torch.bincount(block[sampled & (x.abs() >= joint[block])], minlength=num_blocks)
        samples = torch.bincount(block[sampled], minlength=num_blocks)
        is_wide = (16 * large < 11 * samples) & (narrow >= self.MIN_SCALE)
        return torch.where(is_wide, -self.wide.scales(absmax), narrow)

    def kept(self, x: Tensor, scales: Tensor, block: Tensor) -> Tensor:
        """Return scales of values that no step made: of the levels that alone hold a block exactly.

        `scales` are those of (C9).
        """
        absmax = block_absmax(x, block, len(scales))
        narrow, wide = self.narrow.scales(absmax), self.wide.scales(absmax)
        others = torch.where((scales < 0) | (narrow < self.MIN_SCALE), narrow, -wide)

        def are_exact(scales: Tensor) -> Tensor:
            found = self.decode(self.encode(x, scales[block], None), scales[block], 1.0)
            return torch.bincount(block[found != x], minlength=len(scales)) == 0

        return torch.where(are_exact(scales) | ~are_exact(others), scales, others)

    def decode(self, codes: Tensor, scale: Tensor, gain: float) -> Tensor:
        """Return the decoded values, times `gain`, equation (C1); float32."""
        sign = 1 << self.bits - 1
        code = (codes.to(torch.int64) ^ sign) - sign
        narrow, wide = (q.levels.to(codes.device)[code.abs()] for q in (self.narrow, self.wide))
        decayed = ieee.mul(scale.abs(), gain)
        x = ieee.mul(torch.where(scale < 0, wide, narrow), torch.where(code < 0, -1, 1) * decayed)
        # Kernels compute (1 + level) * scale - scale in one rounding: a scale of 0 makes no -0.
        return torch.where(decayed == 0, 0.0, x)

    def encode(
        self, x: Tensor, scale: Tensor, dither: Tensor | None, settling: float | None = None
    ) -> Tensor:
        """Return the code of each element, equation (C2), in steps (C2') or (C2"); uint8."""
        lives_long = settling is not None and settling < self.narrow.least_settling
        how = (None, dither) if self.is_dithered or lives_long else (settling, None)
        narrow, wide = (q.magnitudes(x, scale.abs(), *how) for q in (self.narrow, self.wide))
        magnitude = torch.where(scale < 0, wide, narrow)
        code = torch.where(x < 0, -magnitude, magnitude)
        return (code & (1 << self.bits) - 1).to(torch.uint8)


@dataclass(frozen=True)
class LogCode:
    """v by its bit pattern, on a logarithmic scale of the block's own range; 0 is a code.

    The block stores its largest element `high`, and `step` in parts of a unit, an integer.  With
    bits(x) the pattern of x, parts = 16, top = 255 and middle = 128, or 4, 63 and 0 for codes of 6
    bits, and integer divisions that round down,

        x(c) = float_from_bits(base + c * step / parts)  for c from 1 to top,  x(0) = 0      (C7)
        base = bits(high) - top * step / parts
        step = (parts * span + top/2) / (top - 1),
               span = bits(high) - bits(low), from 2 to 28 octaves                           (C8)
        c = trunc(fma(bits(x) - base - middle * step / parts, parts/step, 128 + q/65536))
            - (128 - middle),  q = 16 modulo 32

    where `low` is the smallest element that is not 0, or 16 units above the smallest normal float,
    and q = 32768 to nearest.  Elements above 0 but below x(1), or below the first x(c) that is a
    normal float, are raised to it.

    The decoded span gives the same step again, as span and (top - 1) * step / parts are within 8
    units of each other (a test covers all steps).  Decoded values are within 3/65536 of a cell of
    their code, and the smallest element within 12/65536 of code 1: a unit of the pattern is at most
    1/65536, and the conversion to a float, parts/step and the fma err by half of that each.  So no
    q moves them.

    Error: one cell (dithered) or half a cell (nearest).  A cell is step/parts units of the last
    place, so at most step / (2^23 parts) of the value: 0.8 % where the block spans 2 octaves, 5.5 %
    for 14, 11 % for 28, with 6 bits 3.2 %, 23 % and 45 %; sqrt(v) has half of
    that.  Elements more than 28 octaves below `high` are raised to that range: first moments of 8
    bits reach 13 octaves down, which are 26 of v, and a wider range would spend codes on weights
    whose gradient has ended.
    """

    bits: int = 8

    signed = False
    scale_shape = (2,)
    zero_code = 0

    MIN_SPAN = 2 << 23
    MAX_SPAN = 28 << 23
    NORMAL_BITS = 0x00800000
    LOWEST_BITS = NORMAL_BITS + 16

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def part_bits(self) -> int:
        """The logarithm of how many parts of a unit `step` counts; it is less than 2^24 in all."""
        return self.bits - 4

    @property
    def middle(self) -> int:
        """The code from which (C8) counts: a float holds the distances from it well enough."""
        return 128 if self.bits == 8 else 0

    def step_of(self, span: Tensor) -> Tensor:
        """Return the step of spans in units, (C8); int64."""
        step: Tensor = ((span << self.part_bits) + self.top // 2) // (self.top - 1)
        return step

    def scales(self, x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
        """Return (high, step) of each block, equation (C8); 0 for a block of zeros."""
        bits = x.view(torch.int32).to(torch.int64)
        high = bits.new_zeros(num_blocks).scatter_reduce(0, block, bits, "amax")
        nonzero = torch.where(x > 0, bits, 2**31)
        low = torch.full_like(high, 2**31).scatter_reduce(0, block, nonzero, "amin")
        span = (high - low.clamp(min=self.LOWEST_BITS)).clamp(self.MIN_SPAN, self.MAX_SPAN)
        step = self.step_of(span)
        scales = torch.stack([high.to(torch.int32).view(torch.float32), step.float()], dim=1)
        return torch.where((high == 0)[:, None], 0.0, scales)

    def decode(self, codes: Tensor, scale: Tensor, gain: float) -> Tensor:
        """Return the decoded values, times `gain`, equation (C7); float32."""
        step, base = self._step_and_base(scale)
        bits = base + (codes.to(torch.int64) * step >> self.part_bits)
        x = torch.where(codes == 0, 0.0, bits.to(torch.int32).view(torch.float32))
        return ieee.mul(x, gain)

    def encode(
        self, x: Tensor, scale: Tensor, dither: Tensor | None, settling: float | None = None
    ) -> Tensor:
        """Return the code of each element, equation (C8), uint8; ignores settling."""
        # The int64 temporaries, of 8 bytes per element, are freed before fma allocates more.
        threshold = 0.5 if dither is None else ((dither & ~31 | 16) / 65536).to(torch.float32)
        step = scale[..., 1]
        inverse = torch.where(step == 0, 0.0, ieee.div(float(1 << self.part_bits), step))
        position = ieee.fma(
            self._distance(x, scale), inverse, torch.full_like(x, 128.0) + threshold
        )
        offset = 128 - self.middle
        return torch.where(x > 0, position - offset, 0.0).to(torch.uint8)

    def _distance(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return the distance of (C8) from its middle, of x raised to the first level; float32."""
        (step, base), shift = self._step_and_base(scale), self.part_bits
        parts_below = (self.NORMAL_BITS - base << shift) + step - 1
        first = (parts_below // step.clamp(min=1)).clamp(min=1)
        bits = x.view(torch.int32).maximum((base + (first * step >> shift)).to(torch.int32))
        return (bits - base - (self.middle * step >> shift)).to(torch.float32)

    def _step_and_base(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        high = scale[..., 0].contiguous().view(torch.int32).to(torch.int64)
        step = scale[..., 1].to(torch.int64)
        return step, high - (self.top * step >> self.part_bits)
