# SPDX-License-Identifier: Apache-2.0
"""The codes of `dynamic`: the maps of the 8-bit optimizers paper and of bitsandbytes."""

import torch
from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec.levels import NearestEntry

DECADES = 7


def dynamic_code(*, signed: bool) -> NearestEntry:
    """Return the nearest entry of the map of bitsandbytes' `create_dynamic_map`: (C5) and (C6).

    Each decade of entries lies on a line, so that kernels compute entries.  They differ from those
    of bitsandbytes, which torch rounds in another way, by less than 2^-20 of their values.

    Error: at most half the gap around n, times |scale|; the largest gap is 0.0141 (m) or 0.0070
    (v).  With the least scale entries stay normal, and no normal float rounds to 0.
    """
    least = 2.0**-105 if signed else 2.0**-104
    return NearestEntry(signed, 8, lambda: _entries(signed), least)


def _entries(signed: bool) -> Tensor:
    """Return 0, 1, the entries of all decades, and if signed their negatives, ascending."""
    entries = [torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")]
    for cells, gap, origin in zip(*lines_of(signed=signed), strict=True):
        place = torch.arange(int(cells), 2 * int(cells), dtype=torch.float32, device="cpu")
        midpoints = ieee.fma(gap, place, origin)
        entries += [midpoints, -midpoints] if signed else [midpoints]
    return torch.cat(entries).sort().values


def lines_of(*, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of cells of each decade, its gap and its origin; (7,) float32.

    Decade i ends at 10^(i - 6) and has 2^i cells, for moments without a sign 2^(i + 1).  The entry
    in the middle of cell j of c is gap * (c + j) + origin, with one rounding.
    """
    decade = torch.arange(DECADES, dtype=torch.float64, device="cpu")
    end, cells = 10.0 ** (decade + 1 - DECADES), 2.0 ** (decade + (not signed))
    return cells.float(), (0.9 * end / cells).float(), ((0.45 / cells - 0.8) * end).float()
