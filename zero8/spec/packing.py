# SPDX-License-Identifier: Apache-2.0
"""Codes as they lie in bytes, in the units of `zero8.spec.grid.BlockGrid.unit_of`.

The first code has the highest bits of the first byte, as in base64 and in torchao's 4-bit states:

4 bits:  byte 0             = 2^4 c0 + c1
6 bits:  bytes 0, 1 and 2   = 2^18 c0 + 2^12 c1 + 2^6 c2 + c3, of which byte 0 has the highest bits
"""

import torch
from torch import Tensor

from zero8.spec.grid import UNITS, BlockGrid


def packed(codes: Tensor, grid: BlockGrid, first: int, bits: int) -> Tensor:
    """Return the bytes that hold codes, (numel,) uint8, each less than 2^bits.

    `first` is the index in the parameter of the first element.  Codes of 8 bits are returned
    themselves.
    """
    if bits == 8:
        return codes
    unit = UNITS[bits]
    num_units = grid.num_bytes(first, codes.numel(), bits) // unit.num_bytes
    places = codes.new_zeros(num_units * unit.numel)
    places[_places(grid, first, codes.numel(), bits, codes.device)] = codes
    of_unit = places.view(-1, unit.numel)
    if bits == 4:
        return of_unit[:, 0] << 4 | of_unit[:, 1]
    a, b, c, d = of_unit.unbind(1)
    return torch.stack([a << 2 | b >> 4, b << 4 | c >> 2, c << 6 | d], 1).view(-1)


def unpacked(stored: Tensor, grid: BlockGrid, first: int, numel: int, bits: int) -> Tensor:
    """Return the codes that bytes hold, (numel,) uint8; the inverse of `packed`."""
    if bits == 8:
        return stored
    if bits == 4:
        of_unit = torch.stack([stored >> 4, stored & 15], 1)
    else:
        x, y, z = stored.view(-1, 3).unbind(1)
        of_unit = torch.stack([x >> 2, (x << 4 | y >> 4) & 63, (y << 2 | z >> 6) & 63, z & 63], 1)
    return of_unit.view(-1)[_places(grid, first, numel, bits, stored.device)]


def _places(
    grid: BlockGrid, first: int, numel: int, bits: int, device: torch.device
) -> slice | Tensor:
    """Return the places of elements' codes among those of their units."""
    length, of_unit = grid.code_row_length, UNITS[bits].numel
    begin = first % length % of_unit
    if length % of_unit == 0 or first % length + numel <= length:
        return slice(begin, begin + numel)  # all units between the first and the last are full
    index = torch.arange(first, first + numel, dtype=torch.int64, device=device)
    row, column = index // length - first // length, index % length
    return row * of_unit * grid.units_per_row(bits) + column - (first % length - begin)
