# SPDX-License-Identifier: Apache-2.0
"""The codes of `dynamic`: the maps of the 8-bit optimizers paper and of bitsandbytes."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec.blocks import block_absmax
from zero8.spec.levels import decoded


@dataclass(frozen=True)
class DynamicCode:
    """The nearest entry of the paper's dynamic tree map; a tie goes to the larger entry.

        n = x * (1/scale);  code = number of thresholds <= n                                 (C5)
        scale = the block's element of largest magnitude, with its sign                      (C6)

    Error: at most half the gap around n, times |scale|; the largest gap is 0.0141 (m) or 0.0070
    (v).
    """

    signed: bool

    bits = 8
    scale_shape = ()

    @property
    def min_scale(self) -> float:
        """Smaller scales are raised to it: entries stay normal, and no normal float rounds to 0."""
        return 2.0**-105 if self.signed else 2.0**-104

    @cached_property
    def levels(self) -> Tensor:
        """(256,) float32, ascending: the map, equal to bitsandbytes' `create_dynamic_map`."""
        # Seven decades; decade i is divided into 2^i (signed) or 2^(i+1) cells whose midpoints
        # are the entries.  0 and 1 complete the 256.
        entries = [torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")]
        for decade in range(7):
            edges = _edges(1 << decade + (not self.signed))
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
        """Return the decoded values, times `gain`, equation (C1); float32."""
        return decoded(self.levels, codes, scale, gain)

    def encode(
        self, x: Tensor, scale: Tensor, dither: Tensor | None, settling: float | None = None
    ) -> Tensor:
        """Return the code of each element, equation (C5), uint8; ignores dither and settling."""
        inverse = torch.where(scale == 0, 0.0, ieee.div(1.0, scale))
        normalized = ieee.mul(x, inverse)
        code = torch.searchsorted(self.thresholds.to(x.device), normalized, right=True)
        if not self.signed:
            code = torch.where(x > 0, code.clamp(min=1), code)
        return code.to(torch.uint8)


def _edges(num_cells: int) -> Tensor:
    """Return the edges of equal cells from 0.1 to 1, shape (num_cells + 1,), float32.

    These are the numbers of `torch.linspace` on a processor with fma; without fma it rounds twice,
    which would change the values of codes.
    """
    number = torch.arange(num_cells + 1, dtype=torch.float32, device="cpu")
    first = torch.tensor(0.1, dtype=torch.float32, device="cpu")
    width = (1 - first) / num_cells
    return torch.where(
        number < (num_cells + 1) // 2,
        ieee.fma(width, number, first),
        ieee.fma(-width, num_cells - number, 1.0),
    )
