# SPDX-License-Identifier: Apache-2.0
"""Fragments of a parameter whose v is in tiles, cut anywhere, are joined band by band."""

import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero8.algorithms.adam import ADAM
from zero8.checkpoint.files.staging import Staging
from zero8.checkpoint.read.fragment import Fragment
from zero8.checkpoint.read.joined import Assembly
from zero8.spec.codec import SHARED
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable

SHAPES = ((3, 70), (130, 100), (64, 70), (200, 64), (5, 40, 3, 30), (1, 700))
STEP = 7


@st.composite
def fragments(draw):
    """Draw the fragments of a parameter: several runs each, some empty, in any order."""
    shape, block_size = draw(st.sampled_from(SHAPES)), draw(st.sampled_from((64, 256)))
    numel = math.prod(shape)
    cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=6)))
    runs = list(zip([0, *cuts], [*cuts, numel], strict=True))
    count = draw(st.integers(1, 3))
    made = [fragment(shape, block_size, runs[n::count], n) for n in range(count)]
    return draw(st.permutations([one for one in made if one.pieces]))


def fragment(shape, block_size, runs, seed):
    """Return a fragment of these ranges of elements, with moments of its own."""
    generator, pieces, start = torch.Generator().manual_seed(seed), [], 0
    for begin, end in runs:
        pieces.append(Piece(start, end - begin, begin, shape, 5, block_size, "p"))
        start += end - begin
    table, stores = PieceTable(tuple(pieces), start), []
    for rule in ADAM.moments:
        values = torch.exp(3 * torch.randn(start, generator=generator))
        values[torch.rand(start, generator=generator) < 0.1] = 0.0
        stores.append(MomentStore.zeros(SHARED, rule, table))
        stores[-1].write(0, values)
    return Fragment("", "p", Path("f"), STEP, {"history": float(seed)}, tuple(stores))


@settings(max_examples=80, deadline=None)
@given(fragments())
def test_joined_fragments_are_what_their_decoded_values_encode_to(made):
    """Bands within one fragment verbatim: they are what they encode to; so are cut ones, anew."""
    assembly, like = Assembly(made[0], Staging(Path(tempfile.gettempdir()))), made[0].pieces[0]
    numel = math.prod(like.shape)
    whole = PieceTable((Piece(0, numel, 0, like.shape, 5, like.block_size, "p"),), numel)
    dense = torch.full((len(ADAM.moments), numel), math.nan)
    for one in made:
        assembly.add(one)
        for values, store in zip(dense, one.stores, strict=True):
            for piece in one.pieces:
                read = store.read(piece.start, piece.numel)
                values[piece.first : piece.first + piece.numel] = read
    parameter = assembly.finished()
    for rule, values, got in zip(ADAM.moments, dense, parameter.stores, strict=True):
        expected = MomentStore.zeros(SHARED, rule, whole)
        expected.write(0, values)
        assert all(map(torch.equal, got.buffers, expected.buffers))
    band = 64 * like.grid.row_length
    cut = {
        place // band
        for one in made
        for piece in one.pieces
        for place in (piece.first, piece.first + piece.numel)
        if piece.numel and place % band and place != numel
    }
    assert parameter.bands_joined == len(cut)


@pytest.mark.parametrize("row", [math.nan, -1.0])
def test_joined_fragment_with_an_invalid_row_is_refused(row):
    one = fragment((130, 100), 64, [(0, 13000)], 1)
    one.stores[1].scales[3] = row
    with pytest.raises(ValueError, match="^f: exp_avg_sq of p: got a"):
        Assembly(one, Staging(Path(tempfile.gettempdir()))).add(one)
