# SPDX-License-Identifier: Apache-2.0
"""The formats of moments in few bits: the written definition, in plain PyTorch.

A moment is cut into blocks (`zero8.spec.grid`); each block keeps float32 scales, each element a
code.  Two rules hold for every codec:

* quantize is idempotent: for all codes and scales that quantize can produce,
  `quantize(dequantize(codes, scales))` returns them, scales included;
* zero means zero: an element decodes to 0 exactly when its float32 value was 0, except that a
  signed moment may round to 0; an unsigned moment is stored as 0 only if it is 0.  In `linear4` an
  unsigned moment has 0 in blocks of zeros alone: `has_zero`.

A codec has a code for moments that can be negative, such as Adam's first one, m, another for those
of them that live long, such as Lion's, and one for moments that cannot, such as Adam's second one,
v:

* `log` (`zero8.spec.log`): m is a sign and 4 octaves of 32 levels, in blocks with many small
  elements 8 octaves of 16, nearest, or with a beta1 of 0.979 or more rounded by the dither of
  `zero8.spec.dither`.  An m that always lives long is dithered, and on the 4 octaves.  v is on a
  logarithmic scale between the block's largest and smallest non-zero element, rounded by the
  dither, with a code of its own for 0.
* `log6`: the same with 6 bits: octaves of 8 levels or 4, the dither from a beta1 of 0.921, and 63
  codes of v.
* `dynamic` (`zero8.spec.dynamic`): the dynamic tree maps of Dettmers et al., "8-bit Optimizers via
  Block-wise Quantization" (arXiv:2110.02861, section 2.1), signed for m, unsigned for v; nearest
  code.  The scale of m is the block's extreme element with its sign, so that the extreme decodes
  exactly (the signed map ends at -0.993 and +1).
* `fp8` (`zero8.spec.fp8`): 8-bit floats of 3 bits of mantissa, E4M3, for m and v; nearest code.
* `linear4` (`zero8.spec.linear4`): 4 bits, as Li et al. (arXiv:2309.01507) have them without their
  rank-1 scales: a small dynamic tree map for m, equal steps without 0 for v; nearest code.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec.algorithm import MomentRule
from zero8.spec.dynamic import dynamic_code
from zero8.spec.fp8 import Fp8Code
from zero8.spec.levels import NearestEntry
from zero8.spec.linear4 import linear4_code
from zero8.spec.log import LogCode, SignedLogCode
from zero8.spec.shown import shown

MomentCode = SignedLogCode | LogCode | NearestEntry | Fp8Code
"""A code of moments.

`scales` returns those of blocks, `encode` the codes of flushed float32 values, and `decode` the
values.  The last two take the scale of each element's block.  `encode` takes the thresholds of
`zero8.spec.dither.in_blocks`, or None to round to nearest, and in a step the settling of (C2').
"""


@dataclass(frozen=True)
class Codec:
    """The codes of all kinds of moments, and the number that kernels and files use.

    `of_dithered` is of those moments that can be negative and are dithered, where that is not
    `of_signed`, like which it decodes.
    """

    name: str
    number: int
    of_signed: MomentCode
    of_unsigned: MomentCode
    of_dithered: MomentCode | None = None

    def bits_of(self, moments: Sequence[MomentRule]) -> float:
        """Return the mean of the bits of moments' codes, an int if it is a whole number."""
        total = sum(self.code_of(moment).bits for moment in moments)
        return total / len(moments) if total % len(moments) else total // len(moments)

    def code_of(self, moment: MomentRule) -> MomentCode:
        """Return the code of a moment."""
        if not moment.is_signed:
            return self.of_unsigned
        return self.of_dithered if moment.is_dithered and self.of_dithered else self.of_signed


CODECS = {
    codec.name: codec
    for codec in (
        Codec("dynamic", 1, dynamic_code(signed=True), dynamic_code(signed=False)),
        Codec("log", 4, SignedLogCode(), LogCode(), SignedLogCode(is_dithered=True)),
        Codec("log6", 6, SignedLogCode(6), LogCode(6), SignedLogCode(6, is_dithered=True)),
        Codec("linear4", 7, linear4_code(signed=True), linear4_code(signed=False)),
        Codec("fp8", 5, Fp8Code(True), Fp8Code(False)),
    )
}
"""The codecs of `codec=...`, by name."""
DEFAULT_CODEC = "log"


def codec_named(name: str) -> Codec:
    """Return the codec called `name`, or raise ValueError with the valid names."""
    if name not in CODECS:
        raise ValueError(f"codec: got {shown(name)}, expected one of {sorted(CODECS)}")
    return CODECS[name]


def codec_numbered(number: int) -> Codec:
    """Return the codec with this number in files, or raise ValueError."""
    for codec in CODECS.values():
        if type(number) is int and codec.number == number:
            return codec
    raise ValueError(
        f"codec number {shown(number)} is unknown to this version of zero8; it reads "
        f"{sorted((c.number, c.name) for c in CODECS.values())}"
    )


def has_zero(code: MomentCode) -> bool:
    """Return whether an element can be 0 in a block that is not all zeros."""
    return not isinstance(code, NearestEntry) or code.has_zero


def quantize(
    code: MomentCode,
    x: Tensor,
    block: Tensor,
    num_blocks: int,
    dither: Tensor | None = None,
    settling: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the codes, (numel,) uint8, and the scales of a moment, (numel,) float32 and finite.

    `block`, (numel,) int64, is the block of each element, ascending from 0.  Scales are
    (num_blocks, *code.scale_shape) float32; `zero8.spec.packing` stores codes.
    """
    x = ieee.flush(x)
    scales = code.scales(x, block, num_blocks)
    if settling is None and isinstance(code, SignedLogCode) and not code.is_dithered:
        scales = code.kept(x, scales, block)
    return code.encode(x, scales[block], dither, settling), scales


def dequantize(
    code: MomentCode, codes: Tensor, scales: Tensor, block: Tensor, gain: float = 1.0
) -> Tensor:
    """Return the decoded moment, times `gain`; (numel,) float32."""
    return code.decode(codes, scales[block], gain)
