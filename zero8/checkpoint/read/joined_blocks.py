# SPDX-License-Identifier: Apache-2.0
"""Joins the fragments of a moment into the whole one, block by block.

A block within one fragment keeps its codes and scales.  A block that a shard boundary cuts has
scales on each side.  If these differ, it is decoded and encoded as one, to nearest, so that the
moment changes by at most half a code (`zero8.spec.codec`).
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from zero8.spec.codec import dequantize, quantize
from zero8.spec.grid import BlockGrid
from zero8.spec.packing import packed
from zero8.state.store import MomentStore


@dataclass(frozen=True)
class _Part:
    """The elements of a cut block in one fragment, and their scale."""

    begin: int
    end: int
    scale: Tensor


class Blocks:
    """The blocks of a whole moment, which fragments bring part by part."""

    def __init__(self, store: MomentStore):
        """Fill this store."""
        (self._piece,) = store.table.pieces
        self._store = store
        self._cut: dict[int, list[_Part]] = defaultdict(list)

    def take(self, fragment: MomentStore) -> None:
        """Copy a fragment, and keep the scales of the blocks that are cut."""
        (piece,), moment = fragment.table.pieces, fragment.piece(0)
        assert moment.scales is not None, "a moment in blocks has scales"
        begin, end = piece.first, piece.first + piece.numel
        codes = self._store.codes[self._store.bytes_of(0, begin, end)]
        if self._store.code.bits == 8:
            codes.copy_(moment.values)
        else:  # two fragments may each have one half of a byte
            codes |= moment.values
        first, last = (piece.grid.block_of(element) for element in (begin, end - 1))
        self._store.scales[first : last + 1] = moment.scales
        for block in {first, last}:
            low, high = _elements(piece.grid, block)
            high = min(high, self._piece.numel)
            if low < begin or end < high:
                scale = moment.scales[block - first].clone()
                self._cut[block].append(_Part(max(low, begin), min(high, end), scale))

    def finish(self) -> set[int]:
        """Encode cut blocks whose scales differ, of which all parts must be there; return them."""
        return {block for block, parts in self._cut.items() if self._join(block, parts)}

    def _join(self, block: int, parts: list[_Part]) -> bool:
        store, grid = self._store, self._piece.grid
        parts = sorted(parts, key=lambda part: part.begin)
        store.scales[block] = parts[0].scale
        if all(torch.equal(part.scale, parts[0].scale) for part in parts):
            return False
        x = torch.cat([_decoded(store, part) for part in parts])
        codes, scales = quantize(store.code, x, torch.zeros(len(x), dtype=torch.int64), 1)
        begin, end = parts[0].begin, parts[-1].end
        store.codes[store.bytes_of(0, begin, end)] = packed(codes, grid, begin, store.code.bits)
        store.scales[block] = scales[0]
        return True


def _elements(grid: BlockGrid, block: int) -> tuple[int, int]:
    """Return the range of a block's elements in the parameter, which may end before: first, end."""

    def first_of(number: int) -> int:
        row, in_row = divmod(number, grid.blocks_per_row)
        return row * grid.row_length + in_row * grid.block_size

    return first_of(block), first_of(block + 1)


def _decoded(store: MomentStore, part: _Part) -> Tensor:
    codes = store.codes_of(0, part.begin, part.end)
    return dequantize(
        store.code, codes, part.scale[None], torch.zeros_like(codes, dtype=torch.int64)
    )
