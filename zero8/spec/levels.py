# SPDX-License-Identifier: Apache-2.0
"""Codes that are places in a table of levels, and the largest values of blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zero8.spec import arithmetic as ieee

SATURATION = 2.0**126
"""Larger magnitudes are stored as this: beyond it the reciprocal of a scale is subnormal."""


def block_absmax(x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
    """Return the largest |x| of each block, at most 2^126; shape (num_blocks,) float32."""
    magnitude = ieee.flush(x).abs().clamp(max=SATURATION)
    return magnitude.new_zeros(num_blocks).scatter_reduce(0, block, magnitude, "amax")


def decoded(levels: Tensor, codes: Tensor, scale: Tensor, gain: float) -> Tensor:
    """Return level(code) * (scale * gain), equation (C1), of each element; float32."""
    return ieee.mul(levels.to(codes.device)[codes.to(torch.int64)], ieee.mul(scale, gain))


@dataclass(frozen=True)
class NearestEntry:
    """The nearest entry of an ascending map that ends at 1; a tie goes to the larger entry.

        n = x * (1/scale);  code = number of thresholds <= n, less `first`                   (C5)
        scale = the block's element of largest magnitude, with its sign                      (C6)

    So the block's largest element has the last entry, and decodes exactly: to the same scale again.
    Codes below 0 count from 2^bits.  Only 0 has an unsigned moment's code of the entry 0.

    Attributes:
        map: returns the entries, (2^bits,) float32; those of signed codes do not reach -1.
        min_scale: smaller scales are raised to it.
        first: the place of the entry that has code 0.
    """

    signed: bool
    bits: int
    map: Callable[[], Tensor]
    min_scale: float
    first: int = 0

    scale_shape = ()

    @cached_property
    def entries(self) -> Tensor:
        """(2^bits,) float32, ascending."""
        return self.map()

    @property
    def has_zero(self) -> bool:
        """Whether an entry is 0; if not, only blocks of zeros decode to it."""
        return bool((self.levels == 0).any())

    @cached_property
    def levels(self) -> Tensor:
        """(2^bits,) float32: the entries by code."""
        return self.entries.roll(-self.first)

    @cached_property
    def thresholds(self) -> Tensor:
        """(2^bits - 1,) float32: the smallest float whose nearest entry is number i + 1."""
        wide = self.entries.to(torch.float64)
        middle = (wide[:-1] + wide[1:]) / 2
        rounded = middle.to(torch.float32)
        above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
        return torch.where(rounded.to(torch.float64) >= middle, rounded, above)

    @property
    def zero_code(self) -> int:
        """The code of exact zero; 0 without one, as then only blocks of zeros decode to it."""
        return int((self.levels == 0).int().argmax())

    def scales(self, x: Tensor, block: Tensor, num_blocks: int) -> Tensor:
        """Return the scale of each block, equation (C6); 0 for a block of zeros."""
        absmax = block_absmax(x, block, num_blocks)
        largest = block_absmax(x.clamp(min=0.0), block, num_blocks)
        sign = torch.where(largest == absmax, 1.0, -1.0)
        scale = torch.where(absmax < self.min_scale, self.min_scale, sign * absmax)
        return torch.where(absmax == 0, 0.0, scale)

    def decode(self, codes: Tensor, scale: Tensor, gain: float) -> Tensor:
        """Return the decoded values, times `gain`, equation (C1); float32."""
        return decoded(self.levels, codes, scale, gain)

    def encode(
        self, x: Tensor, scale: Tensor, dither: Tensor | None, settling: float | None = None
    ) -> Tensor:
        """Return the code of each element, equation (C5), uint8; ignores dither and settling."""
        inverse = torch.where(scale == 0, 0.0, ieee.div(1.0, scale))
        normalized = ieee.mul(x, inverse)
        place = torch.searchsorted(self.thresholds.to(x.device), normalized, right=True)
        if self.has_zero and not self.signed:
            place = torch.where(x > 0, place.clamp(min=1), place)
        return (place - self.first & (1 << self.bits) - 1).to(torch.uint8)
