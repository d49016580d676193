# SPDX-License-Identifier: Apache-2.0
"""Joins the fragments of a moment in tiles (`zero8.spec.tiles`) into the whole one.

A band within one fragment keeps its codes and scales.  A band that a shard boundary cuts has tiles
on each side.  It is decoded and encoded as one, to nearest: in place of v stands the product of its
row and its column in the whole tile.
"""

from collections import defaultdict

import torch
from torch import Tensor

from zero8.spec.tiles import ROWS_PER_BAND
from zero8.state.store import MomentStore


class Bands:
    """The bands of a whole moment, which fragments bring part by part."""

    def __init__(self, store: MomentStore):
        """Fill this store."""
        (self._piece,) = store.table.pieces
        self._store = store
        self._numel = ROWS_PER_BAND * self._piece.grid.row_length
        self._cut: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)

    def take(self, fragment: MomentStore, number: int) -> None:
        """Copy the whole bands of a fragment's piece, and keep the values of those that are cut."""
        piece = fragment.table.pieces[number]
        begin, end = piece.first, piece.first + piece.numel
        last = end if end == self._piece.numel else end // self._numel * self._numel
        first = min(-(-begin // self._numel) * self._numel, last)
        if first < last:
            self._copy(fragment, number, first, last)
        for low, high in ((begin, max(first, begin)), (max(last, begin), end)):
            if low < high:
                values = fragment.read(piece.start + low - begin, high - low)
                self._cut[low // self._numel].append((low, values))

    def _copy(self, fragment: MomentStore, number: int, first: int, last: int) -> None:
        begin, moment = fragment.table.pieces[number].first, fragment.piece(number)
        assert moment.scales is not None, "a moment in tiles has scales"
        theirs = fragment.bytes_of(number, first - begin, last - begin)
        self._store.codes[self._store.bytes_of(0, first, last)] = moment.values[theirs]
        blocks = [self._piece.grid.block_of(element) for element in (begin, first, last - 1)]
        scales = moment.scales[blocks[1] - blocks[0] : blocks[2] + 1 - blocks[0]]
        self._store.scales[blocks[1] : blocks[2] + 1] = scales

    def finish(self) -> set[int]:
        """Encode the cut bands, of which all parts must be there; return them."""
        for band, parts in self._cut.items():
            values = [values for _, values in sorted(parts, key=lambda part: part[0])]
            self._store.write(band * self._numel, torch.cat(values))
        return set(self._cut)
