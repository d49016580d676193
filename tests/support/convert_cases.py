# SPDX-License-Identifier: Apache-2.0
"""What the tests of conversions share: the command, and which blocks a shard boundary cuts."""

import math
from pathlib import Path

import pytest
import torch
from convert_model import SHAPES
from fragments import fragments_in

from zero8.checkpoint.commands import convert
from zero8.spec.grid import BlockGrid

MOMENTS = ("exp_avg", "exp_avg_sq")
STAGES, WORLDS = (1, 2, 3), (1, 2, 3)
SOURCES = [
    *(f"zero{stage}x{world}" for stage in STAGES for world in WORLDS),
    *(f"dcpx{world}" for world in WORLDS),
    "plain",
]
ZERO = {"zero": {"sub_group_size": 9000}, "weight_decay": 0.0}
"""Settings of every engine, beside those of the groups."""
QUANTIZED = ("embed", "wide", "conv", "lora_b", "unused")


def converted(source, target, to):
    """Convert; return what the command prints as JSON."""
    return convert.convert(Path(source), Path(target), to)


def refusal(source, target, to="plain"):
    """Return why a conversion is refused, and check that it has left nothing."""
    before = sorted(target.parent.iterdir())
    with pytest.raises((OSError, ValueError)) as caught:
        convert.convert(source, target, to)
    assert sorted(target.parent.iterdir()) == before
    return str(caught.value)


def same(a, b, keys):
    """Return whether entries of two states are the same bits."""
    return all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in keys)


def rows_of(world):
    """Return (name, first element, elements) of the rows that each rank of FSDP2 holds."""
    return [
        (name, start * width, min(chunk, SHAPES[name][0] - start) * width)
        for name in SHAPES
        for width in [math.prod(SHAPES[name][1:])]
        for chunk in [-(-SHAPES[name][0] // world)]
        for start in range(0, SHAPES[name][0], chunk)
    ]


def pieces_of(source):
    """Return (name, first element, elements) of what ranks have saved."""
    if (Path(source) / ".metadata").exists():  # whose parameters are read as wholes
        return rows_of(len(list(Path(source).glob("*.distcp"))))
    return [
        (fragment.name, fragment.piece.first, fragment.piece.numel)
        for fragment in fragments_in(source)
    ]


def uncut(name, *all_pieces):
    """Return which elements of a parameter are in blocks that lie in one piece, everywhere."""
    shape, kept = SHAPES[name], torch.ones(math.prod(SHAPES[name]), dtype=torch.bool)
    if name not in QUANTIZED:
        return kept.view(shape)
    block, count = BlockGrid.of(shape, 256).block_numbers(0, kept.numel())
    whole = torch.zeros(count, dtype=torch.bool)
    for pieces in all_pieces:
        whole[:] = False
        runs = [(first, numel) for owner, first, numel in pieces if owner == name and numel]
        for first, numel in runs or [(0, kept.numel())]:
            inside = torch.bincount(block[first : first + numel], minlength=count)
            whole |= inside == torch.bincount(block, minlength=count)
        kept &= whole[block]
    return kept.view(shape)


def check(got, expected, *all_pieces, names=SHAPES):
    """Check that values and moments are equal bit by bit, except in blocks that are cut."""
    for name in names:
        kept = uncut(name, *all_pieces)
        assert kept.float().mean() > 0.85
        for key, values in expected[name].items():
            ours, theirs = (t.view(SHAPES[name])[kept] for t in (got[name][key], values))
            assert torch.equal(ours, theirs), f"{name}.{key}"


def trained_names(source):
    """ZeRO knows nothing of the optimizer's frozen parameters."""
    return {name for name in SHAPES if name != "frozen"} if "zero" in source else set(SHAPES)
