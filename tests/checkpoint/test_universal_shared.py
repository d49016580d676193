# SPDX-License-Identifier: Apache-2.0
"""ZeRO checkpoints of `Adam8bitShared` at other world sizes and stages, and as plain ones.

What is loaded, or converted, is the encoding of what was saved, decoded: verbatim where a band was
and is whole, as encoding is idempotent.
"""

import math
from functools import cache
from itertools import pairwise

import pytest
import torch
from checkpoint_command import called
from universal_cuts import BLOCK_SIZE, travel
from universal_worker import TallParts, settings
from zero_shards import code_of, put_together
from zero_worker import MOMENTS

from zero8.algorithms.adam import ADAM
from zero8.spec.codec import SHARED
from zero8.state.entries import codes_key
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable

OPTIMIZER = {"optimizer": "Adam8bitShared"}
TRAINED = [name for name in TallParts.SHAPES if name != "frozen"]
IN_TILES = ("embed", "wide", "conv", "unused")
# World sizes, and the stages there.
CHAINS = {
    "2 to 3": ((2, 3), (settings(2, "cpu", **OPTIMIZER), settings(3, **OPTIMIZER))),
    "3 to 1": (
        (4, 1, 3),
        (
            settings(3, "cpu", dtype={}, **OPTIMIZER),
            settings(1, dtype={}, **OPTIMIZER),
            settings(2, dtype={}, **OPTIMIZER),
        ),
    ),
}
STEPS = ((0, 1), (2,), (3,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def journey(standing_ranks, folder):
    """Return a function: of a chain, what the ranks held at each of its stops."""

    @cache
    def of(name):
        world_sizes, configs = CHAINS[name]
        return travel(standing_ranks, world_sizes, STEPS, {name: configs}, folder)[name]

    return of


def dense_of(ranks):
    """Return by parameter what ranks hold together: the weights, and the moments in float32."""
    found = {}
    for name, entry in put_together(ranks, BLOCK_SIZE, SHARED).items():
        assert entry["holders"].eq(1).all(), name
        values = [entry["weights"]]
        for which in MOMENTS:
            scales = entry.get(f"{which}_scale")
            code = code_of(SHARED, which)
            values.append(entry[which] if scales is None else code.decode(entry[which], scales, 1))
        found[name] = values
    return found


def encoded(which, table, dense):
    """Return the buffers of a moment over a segment table, written with values by parameter."""
    store = MomentStore.zeros(SHARED, ADAM.moment(which), table)
    for piece in table.pieces:
        store.write(piece.start, dense[piece.name][piece.first : piece.first + piece.numel])
    return store.buffers


@pytest.mark.parametrize("name", ["2 to 3", pytest.param("3 to 1", marks=pytest.mark.slow)])
def test_shared_universal_checkpoint_loads_what_its_values_encode_to(journey, name):
    for before, after in pairwise(journey(name)):
        saved = dense_of([rank["stepped"] for rank in before])
        assert sorted(saved) == sorted(TRAINED)
        for rank in after:
            for state in rank["loaded"]["states"]:
                table = PieceTable(tuple(state["pieces"]), len(state["master"]))
                for number, which in enumerate(MOMENTS, 1):
                    dense = {one: values[number] for one, values in saved.items()}
                    expected = encoded(which, table, dense)
                    assert all(map(torch.equal, state[which], expected)), which
                for piece in table.pieces:
                    here = slice(piece.first, piece.first + piece.numel)
                    master = state["master"][piece.start : piece.start + piece.numel]
                    assert torch.equal(master, saved[piece.name][0][here])


def test_shared_zero_checkpoint_becomes_a_plain_one_that_its_values_encode_to(
    journey, folder, tmp_path, capsys
):
    """Two ranks cut a parameter in each of three groups at most, within a band."""
    saved = dense_of([rank["stepped"] for rank in journey("2 to 3")[0]])
    source, plain = folder / "2 to 3" / "0" / "saved", tmp_path / "plain.pt"
    assert called(capsys, "inspect", source)["codecs"] == ["shared"]
    assert called(capsys, "verify", source)["problems"] == []
    result = called(capsys, "convert", source, plain, "--to", "plain")
    assert 1 <= result["bands_joined"] <= 3
    content = torch.load(plain)["optimizer"]
    names = [name for group in content["param_groups"] for name in group["param_names"]]
    assert sorted(names) == sorted(TRAINED)
    for number, name in enumerate(names):
        state, shape = content["state"][number], TallParts.SHAPES[name]
        assert state["step"] == len(STEPS[0])
        block_size = BLOCK_SIZE if name in IN_TILES else 0
        piece = Piece(0, math.prod(shape), 0, shape, 0, block_size, name)
        for place, which in enumerate(MOMENTS, 1):
            dense = {name: saved[name][place]}
            expected = encoded(which, PieceTable((piece,), piece.numel), dense)
            keys = (codes_key(ADAM.moment(which), code_of(SHARED, which)), f"{which}_scale", which)
            for key, buffer in zip(keys, expected, strict=True):
                assert torch.equal(state.get(key, buffer[:0]).flatten(), buffer), (name, key)
