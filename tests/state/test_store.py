# SPDX-License-Identifier: Apache-2.0
"""The segment table and the storage of one moment, against a mirror that keeps every element."""

import math
import os
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moment_samples import spread_values

from zero8.environment import host_memory
from zero8.op import kernel
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, codec_named, dequantize, quantize
from zero8.spec.lion import LION
from zero8.state import store
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable

# Shape, and how many elements a row has: the shortest row of 64 or more, cut at the block size, or
# a narrow row, of which as many as fit make a block.
SHAPES_8BIT = (
    *(((3, 70), 70), ((2, 300), 300), ((4, 5, 13), 65), ((1, 64), 64), ((2, 9, 8), 72)),
    *(((100, 5), 5), ((50, 1, 3, 3), 9), ((300, 1), 1), ((9, 2, 20), 40), ((5, 63), 63)),
)
SHAPES_DENSE = ((7,), (3, 5), (0,))


def row_of(piece):
    row = dict(SHAPES_8BIT)[piece.shape]
    return row if row >= 64 else piece.block_size // row * row


def block_key(piece, element):
    """Return what tells an element's block from the other blocks of the shard."""
    row, column = divmod(element, row_of(piece))
    return piece.start, row, column // piece.block_size


@st.composite
def tables(draw):
    """Draw shards: 8-bit and float32 pieces, cut anywhere, and padding between and after them."""
    parts, position = [], 0
    for number in range(draw(st.integers(1, 4))):
        position += draw(st.sampled_from((0, 0, 1, 5)))
        block_size = draw(st.sampled_from((0, 64, 256)))
        shapes = [shape for shape, _ in SHAPES_8BIT] if block_size else SHAPES_DENSE
        shape = draw(st.sampled_from(shapes))
        total = math.prod(shape)
        first = draw(st.integers(0, max(0, total - 1)))
        numel = draw(st.integers(min(1, total), total - first))
        parts.append(Piece(position, numel, first, shape, number, block_size, f"p{number}"))
        position += numel
    return PieceTable(tuple(parts), position + draw(st.integers(0, 5)))


class Mirror:
    """What a store must decode to, element by element; blocks are found one element at a time."""

    def __init__(self, code, table):
        self.code = code
        self.values = torch.zeros(table.numel)
        self.dense, self.blocks = [], {}
        for piece in table.pieces:
            for i in range(piece.numel):
                if piece.block_size:
                    key = block_key(piece, piece.first + i)
                    self.blocks.setdefault(key, []).append(piece.start + i)
                else:
                    self.dense.append(piece.start + i)

    def write(self, start, values):
        inside = range(start, start + len(values))
        for i in self.dense:
            if i in inside:
                self.values[i] = values[i - start]
        for elements in self.blocks.values():
            if not any(i in inside for i in elements):
                continue
            x = self.values[elements]
            for place, i in enumerate(elements):
                if i in inside:
                    x[place] = values[i - start]
            one_block = torch.zeros(len(elements), dtype=torch.int64)
            codes, scales = quantize(self.code, x, one_block, 1)
            self.values[elements] = dequantize(self.code, codes, scales, one_block)


@settings(max_examples=60)
@given(
    tables(),
    st.sampled_from(sorted(CODECS)),
    st.sampled_from((*ADAM.moments, *LION.moments)),
    st.sampled_from(sorted(kernel.isas())),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 999)), min_size=1),
    st.sampled_from((1, 100, store.CHUNK_NUMEL)),
)
def test_store_any_writes_reads_what_the_mirror_holds(table, codec, rule, isa, writes, chunk_numel):
    """Bit equality: a block written in part is encoded again, and encoding keeps decoded values."""
    with (
        patch.object(store, "CHUNK_NUMEL", chunk_numel),
        patch.dict(os.environ, ZERO8_ISA=isa),
    ):
        check_against_mirror(table, codec, rule, writes)


def check_against_mirror(table, codec, rule, writes):
    store = MomentStore.zeros(codec_named(codec), rule, table)
    mirror = Mirror(store.code, table)
    for from_, to, seed in writes[:4]:
        start = round(from_ * table.numel)
        values = spread_values(rule.name, round(to * (table.numel - start)), seed)
        store.write(start, values)
        mirror.write(start, values)
        assert torch.equal(store.read(0, table.numel), mirror.values)
        # Any range reads the same as the whole.
        assert torch.equal(store.read(start, len(values)), mirror.values[start:][: len(values)])


def mixed_store(codec="log", which="exp_avg"):
    """Return a store of one piece of each kind, cut at both ends, with padding."""
    parts = (
        Piece(2, 400, 150, (2, 300), 1, 256, "cut"),
        Piece(402, 7, 0, (7,), 2, 0, "dense"),
        Piece(411, 192, 0, (3, 64), 3, 64, "whole"),
    )
    store = MomentStore.zeros(codec_named(codec), ADAM.moment(which), PieceTable(parts, 605))
    store.write(0, spread_values(which, 605, seed=1))
    return store


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("which", ["exp_avg", "exp_avg_sq"])
def test_write_of_a_value_that_a_moment_cannot_have_makes_its_block_nan(codec, which, fault):
    store = mixed_store(codec, which)
    expected = store.read(0, 605)
    if which == "exp_avg_sq" or not math.isfinite(fault):
        expected[475:539] = math.nan  # the second of the whole piece's rows of 64
        store.write(500, torch.tensor([fault]))
    torch.testing.assert_close(store.read(0, 605), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", CODECS)
def test_long_moments_are_read_and_written_in_chunks(codec, monkeypatch):
    """Each element of a chunk is a float for a while; one may be longer by two blocks."""
    numbers = []

    def counting(original):
        def counted(coded, x):
            numbers.append(len(x))
            original(coded, x)

        return counted

    monkeypatch.setattr(store, "CHUNK_NUMEL", 1024)
    for name in ("read_moment", "write_moment"):
        monkeypatch.setattr(kernel, name, counting(getattr(kernel, name)))
    table = PieceTable((Piece(0, 1 << 16, 30, (1 << 10, 128), 1, 64, "p"),), 1 << 16)
    moment = MomentStore.zeros(codec_named(codec), ADAM.moment("exp_avg"), table)
    moment.write(0, spread_values("exp_avg", 1 << 16, 1))
    moment.read(0, 1 << 16)
    assert 1000 < max(numbers) <= 1024 + 2 * 64


# --- Huge pages -----------------------------------------------------------------------------------

NUMEL = 8 * store.HUGE_PAGE_BYTES


PLACES = [(0, NUMEL), (1, NUMEL - 1), (4097, 5_000_000), (0, store.HUGE_PAGE_BYTES - 1), (0, 0)]


@pytest.mark.parametrize(("start", "numel"), PLACES)
def test_advise_huge_never_reaches_beyond_the_tensor(start, numel, monkeypatch):
    calls = []
    monkeypatch.setattr(host_memory, "_madvise", lambda: lambda *call: calls.append(call))
    x = torch.empty(NUMEL, dtype=torch.uint8)[start : start + numel]
    assert store.advise_huge(x) is x
    assert len(calls) == (numel >= 2 * store.HUGE_PAGE_BYTES)
    for begin, length, _ in calls:
        assert begin % store.HUGE_PAGE_BYTES == length % store.HUGE_PAGE_BYTES == 0
        assert x.data_ptr() <= begin and begin + length <= x.data_ptr() + numel
        assert length > numel - 2 * store.HUGE_PAGE_BYTES
