# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every kind that are out in the world are read as what they were.

They were made by `git show 4fd0748:tests/checkpoint/test_golden.py`, and are never made again: they
stand for the checkpoints that users have.  A new format version gets files of its own.
"""

import pytest
import torch
from fragments import fragments_in
from places import GOLDEN

from zero8.checkpoint.read.open import open_checkpoint

KINDS = {
    "plain_checkpoint.pt": "plain",
    "zero2_checkpoint": "zero",
    "zero3_checkpoint": "zero",
    "dcp_checkpoint": "dcp",
}
NAMES = {"wide.weight", "wide.bias", "narrow.weight"}


def expected_of(name):
    """Return the moments of each run of elements, by (parameter, first element, elements)."""
    ranks = torch.load(GOLDEN / "checkpoint_moments.pt", weights_only=True)[name]
    runs = [run for rank in ranks for run in rank]
    return {(label, first, len(m)): (m, v) for label, first, m, v in runs}


def runs_of(fragments):
    found = {}
    for fragment in fragments:
        piece = fragment.piece
        moments = tuple(store.read(0, piece.numel) for store in fragment.stores)
        found[fragment.name, piece.first, piece.numel] = moments
    return found


@pytest.mark.parametrize("name", KINDS)
def test_golden_checkpoint_decodes_to_the_moments_of_its_run(name):
    source = open_checkpoint(GOLDEN / name)
    assert source.kind == KINDS[name]
    fragments = [one for one in fragments_in(source) if one.file.suffix != ".swp"]
    assert {one.name for one in fragments} == NAMES
    assert {one.step for one in fragments} == {3}
    assert all(one.weights.isfinite().all() for one in fragments)
    groups = source.groups()
    assert {group["lr"] for group in groups} == {1e-2}
    assert {label for group in groups for label in group["params"]} == NAMES
    found, expected = runs_of(fragments), expected_of(name)
    assert sum(key[2] for key in found) == sum(key[2] for key in expected)
    for (label, first, numel), moments in expected.items():
        (run,) = (  # of a folder of DCP, all of a parameter
            (begin, there)
            for (one, begin, held), there in found.items()
            if one == label and begin <= first and first + numel <= begin + held
        )
        kept = torch.arange(first, first + numel)
        if (name, label) == ("dcp_checkpoint", "narrow.weight"):
            # Rows of 30 in blocks of 8: what the ranks cut after row 12 is encoded as one.
            kept = kept[(kept < 240) | (kept >= 480)]
        for got, m in zip(run[1], moments, strict=True):
            assert torch.equal(got[kept - run[0]], m[kept - first])
