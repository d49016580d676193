# SPDX-License-Identifier: Apache-2.0
"""The codes of `dynamic`: the maps of the 8-bit optimizers paper and of bitsandbytes."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec.levels import NearestEntry


@dataclass(frozen=True)
class DynamicCode(NearestEntry):
    """The nearest entry of the paper's dynamic tree map: (C5) and (C6).

    Only 0 has an unsigned moment's code of 0.  Error: at most half the gap around n, times |scale|;
    the largest gap is 0.0141 (m) or 0.0070 (v).
    """

    bits = 8

    @property
    def min_scale(self) -> float:
        """Smaller scales are raised to it: entries stay normal, and no normal float rounds to 0."""
        return 2.0**-105 if self.signed else 2.0**-104

    @cached_property
    def entries(self) -> Tensor:
        """(256,) float32, ascending: the map, equal to bitsandbytes' `create_dynamic_map`."""
        return tree_map(7, 0 if self.signed else 1, signed=self.signed)

    def encode(
        self, x: Tensor, scale: Tensor, dither: Tensor | None, settling: float | None = None
    ) -> Tensor:
        """Return the code of each element, equation (C5), uint8; ignores dither and settling."""
        code = super().encode(x, scale, dither, settling)
        return code if self.signed else torch.where(x > 0, code.clamp(min=1), code)


def tree_map(num_decades: int, bits_of_first: int, *, signed: bool) -> Tensor:
    """Return the entries of a dynamic tree map, ascending, float32.

    Decade i, which ends at 10^(i + 1 - num_decades), is divided into 2^(i + bits_of_first) cells
    whose midpoints are entries, and so are their negatives if the map is signed, and 0 and 1.
    """
    entries = [torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")]
    for decade in range(num_decades):
        edges = _edges(1 << decade + bits_of_first)
        midpoints = 10.0 ** (decade - num_decades + 1) * ((edges[:-1] + edges[1:]) / 2.0)
        entries += [midpoints, -midpoints] if signed else [midpoints]
    return torch.cat(entries).sort().values


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
