# SPDX-License-Identifier: Apache-2.0
"""Stores of v of rank 1 in tiles: what is written, and what is read of it."""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero8.algorithms.adam import ADAM
from zero8.spec.codec import SHARED
from zero8.spec.shared import MAX_ROW, MIN_ROW
from zero8.spec.tiles import tiles_of
from zero8.state import store
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable

V = ADAM.moment("exp_avg_sq")
SHAPES = ((3, 70), (2, 300), (4, 5, 13), (70, 100), (130, 64), (2, 9, 8))


@st.composite
def tables(draw):
    """Draw shards: pieces in tiles or in float32, cut anywhere, and padding between them."""
    parts, position = [], 0
    for number in range(draw(st.integers(1, 3))):
        position += draw(st.sampled_from((0, 1, 5)))
        shape, block_size = draw(st.sampled_from(SHAPES)), draw(st.sampled_from((0, 64, 256)))
        total = math.prod(shape)
        first = draw(st.integers(0, total - 1))
        numel = draw(st.integers(1, total - first))
        parts.append(Piece(position, numel, first, shape, number, block_size, f"p{number}"))
        position += numel
    return PieceTable(tuple(parts), position + draw(st.integers(0, 5)))


def squares(numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.exp(4 * torch.randn(numel, generator=generator))
    return torch.where(torch.rand(numel, generator=generator) < 0.1, 0.0, x)


def bands_of(piece: Piece) -> list[tuple[int, int]]:
    """Return the ranges of a piece's elements in each band, in the piece."""
    band = 64 * piece.grid.row_length
    cuts = range(piece.first // band * band, piece.first + piece.numel, band)
    ends = [(cut - piece.first, cut + band - piece.first) for cut in cuts]
    return [(max(begin, 0), min(end, piece.numel)) for begin, end in ends]


@settings(max_examples=60, deadline=None)
@given(
    tables(),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 999)), min_size=1),
    st.sampled_from((1, 5000, store.CHUNK_NUMEL)),
)
def test_shared_store_any_writes_reads_the_codes_of_whole_bands(table, writes, chunk_numel):
    """The mirror encodes each band that a write touches, by the definition, and decodes it."""
    moment, mirror = MomentStore.zeros(SHARED, V, table), torch.zeros(table.numel)
    with patch.object(store, "CHUNK_NUMEL", chunk_numel):
        for from_, to, seed in writes[:3]:
            start = round(from_ * table.numel)
            values = squares(round(to * (table.numel - start)), seed)
            moment.write(start, values)
            written = mirror.clone()
            written[start : start + len(values)] = values
            for piece in table.pieces:
                for begin, end in [(0, piece.numel)] if not piece.is_quantized else bands_of(piece):
                    here = slice(piece.start + begin, piece.start + end)
                    touched = here.start < start + len(values) and start < here.stop
                    if touched:
                        mirror[here] = _kept(piece, begin, end, written[here])
            assert torch.equal(moment.read(0, table.numel), mirror)
            assert torch.equal(moment.read(start, len(values)), mirror[start:][: len(values)])


def _kept(piece: Piece, begin: int, end: int, x: torch.Tensor) -> torch.Tensor:
    if not piece.is_quantized:
        return x
    place = piece.grid, piece.first + begin, end - begin
    block, _ = piece.grid.block_numbers(*place[1:])
    codes, rows = SHARED.of_unsigned.encoded(x, block, tiles_of(*place), None)
    return SHARED.of_unsigned.decode(codes, rows[block], 1.0)


@settings(max_examples=40, deadline=None)
@given(tables(), st.integers(0, 999))
def test_shared_store_written_with_what_it_reads_keeps_every_byte(table, seed):
    moment = MomentStore.zeros(SHARED, V, table)
    moment.write(0, squares(table.numel, seed))
    before = moment.clone()
    moment.write(0, moment.read(0, table.numel))
    assert all(map(torch.equal, moment.buffers, before.buffers))
    moment.check()
    moment.check_values()


@settings(max_examples=40, deadline=None)
@given(tables())
def test_shared_store_has_a_byte_for_each_64_columns_that_it_touches(table):
    moment, expected = MomentStore.zeros(SHARED, V, table), 0
    for piece in table.pieces:
        elements = range(piece.first, piece.first + piece.numel) if piece.is_quantized else ()
        length = piece.grid.row_length
        expected += len({(element // length, element % length // 64) for element in elements})
    assert moment.codes.numel() == expected
    assert moment.scales.shape == (table.num_blocks,)


@pytest.mark.parametrize("row", [-1.0, math.inf, math.nan, MAX_ROW * 2, MIN_ROW / 2])
def test_shared_store_with_an_invalid_row_is_refused(row):
    table = PieceTable((Piece(0, 6400, 0, (64, 100), 1, 64, "p"),), 6400)
    moment = MomentStore.zeros(SHARED, V, table)
    moment.check_values()
    moment.scales[3] = row
    with pytest.raises(ValueError, match="exp_avg_sq of p: got a (negative )?scale"):
        moment.check_values()
