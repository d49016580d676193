# SPDX-License-Identifier: Apache-2.0
"""What the tests of conversions share: the command, and which blocks a shard boundary cuts."""

import argparse
import math
import re
from pathlib import Path

import torch
from convert_model import SHAPES
from fragments import fragments_in
from torch.distributed.checkpoint import FileSystemReader

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
    """Convert by the command; return its JSON object."""
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    status, found, text = convert.run(parser.parse_args([str(source), str(target), "--to", to]))
    assert status == 0, text
    return found


def refusal(source, target, to="plain"):
    """Return what the command says when it refuses, and check that it has left nothing."""
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    before = sorted(target.parent.iterdir())
    status, found, text = convert.run(parser.parse_args([str(source), str(target), "--to", to]))
    assert status == 1 and found["error"] in text
    assert sorted(target.parent.iterdir()) == before
    return found["error"]


def same(a, b, keys):
    """Return whether entries of two states are the same bits."""
    return all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in keys)


def pieces_of(source):
    """Return (name, first element, elements) of what ranks have saved."""
    if (Path(source) / ".metadata").exists():  # whose parameters are read as wholes
        entries = FileSystemReader(source).read_metadata().state_dict_metadata
        states = ((re.search(r"state\.(.+)\.exp_avg(_q8)?$", key), entries[key]) for key in entries)
        return [
            (found[1], chunk.offsets[0] * math.prod(entry.size[1:]), math.prod(chunk.sizes))
            for found, entry in states
            if found
            for chunk in entry.chunks
        ]
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
