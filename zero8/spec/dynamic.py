# SPDX-License-Identifier: Apache-2.0
"""The codes of `dynamic`: the maps of the 8-bit optimizers paper and of bitsandbytes."""

from functools import partial

import torch
from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec.levels import NearestEntry


def dynamic_code(*, signed: bool) -> NearestEntry:
    """Return the nearest entry of the map of bitsandbytes' `create_dynamic_map`: (C5) and (C6).

    Error: at most half the gap around n, times |scale|; the largest gap is 0.0141 (m) or 0.0070
    (v).  With the least scale entries stay normal, and no normal float rounds to 0.
    """
    entries = partial(tree_map, 7, 0 if signed else 1, signed=signed)
    return NearestEntry(signed, 8, entries, 2.0**-105 if signed else 2.0**-104)


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
