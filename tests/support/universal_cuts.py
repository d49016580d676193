# SPDX-License-Identifier: Apache-2.0
"""Converts checkpoints, and compares what ranks held before with what others hold afterwards."""

from argparse import Namespace
from pathlib import Path

import torch
from convert_worker import visit
from deepspeed.checkpoint import ds_to_universal
from zero_shards import put_together

from zero8.checkpoint.commands import convert as command
from zero8.spec.adam import ADAM
from zero8.spec.codec import DEFAULT_CODEC, codec_named

BLOCK_SIZE = 256


def convert(folder):
    """Convert the latest checkpoint of a folder into TAG_universal beside it; return the result."""
    folder = Path(folder)
    tag = f"{(folder / 'latest').read_text()}_universal"
    return command.convert(folder, folder / tag, "zero")


def convert_fp32(folder):
    """Convert the latest checkpoint of an fp32 Adam by DeepSpeed's own converter."""
    tag = (Path(folder) / "latest").read_text()
    options = Namespace(
        input_folder=f"{folder}/{tag}",
        output_folder=f"{folder}/{tag}_universal",
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    ds_to_universal.main(options)


def travel(ranks_of, world_sizes, all_steps, chains, folder, grouped=True):
    """Take chains of configs through world sizes; return by chain what the ranks held at each."""
    visits = {name: [] for name in chains}
    for hop, (world_size, steps) in enumerate(zip(world_sizes, all_steps, strict=False)):
        jobs = [
            {
                "ds_config": configs[hop],
                "source": f"{folder}/{name}/{hop - 1}" if hop else None,
                "target": f"{folder}/{name}/{hop}",
                "steps": steps,
                "grouped": grouped,
            }
            for name, configs in chains.items()
        ]
        ranks = ranks_of(world_size).run(visit, timeout_s=400, jobs=jobs)
        for number, name in enumerate(chains):
            visits[name].append([rank[number] for rank in ranks])
            if hop + 1 < len(world_sizes):
                convert(f"{folder}/{name}/{hop}")
    return visits


def joined(ranks):
    """Return by parameter what ranks hold together; see `zero_shards.put_together`."""
    return put_together(ranks, BLOCK_SIZE)


def check_moments(exact, held):
    """Compare moments, by parameter, with the codes that they got in a `joined`, or float32."""
    assert held.keys() == exact.keys()
    for name, moments in exact.items():
        for which, values in moments.items():
            scales = held[name].get(f"{which}_scale")
            if scales is None:
                assert torch.equal(held[name][which], values), (name, which)
            else:
                check_within_half_a_code(values, held[name][which], scales, which)


def check_within_half_a_code(exact, codes, scales, which):
    """Compare values with the codes that they got, with these scales.

    Both codes of `log` take the nearest level by the bit pattern, which is linear within an octave,
    so half a code is at most half of the wider of the two gaps beside a level; beside the lowest
    and the highest level of v, which has one neighbour of its kind, at most the gap.
    """
    code = codec_named(DEFAULT_CODEC).code_of(ADAM.moment(which))
    got = code.decode(codes, scales, 1.0)
    every = torch.arange(256, dtype=torch.uint8).repeat(len(codes), 1)
    per_code = scales[:, None].expand(-1, 256, *scales.shape[1:])
    levels = code.decode(every, per_code, 1.0)
    below = torch.where(levels < got[:, None], levels, -torch.inf).amax(dim=1)
    above = torch.where(levels > got[:, None], levels, torch.inf).amin(dim=1)
    assert ((below <= exact) & (exact <= above)).all(), which
    gaps = torch.stack([got - below, above - got])
    inner = gaps.isfinite().all(dim=0) & (below != 0 if which == "exp_avg_sq" else True)
    allowed = gaps.amax(dim=0) / 2 * (1 + 1e-5)
    assert ((got - exact).abs() <= allowed)[inner].all(), which


def decoded(entry, which):
    """Return a moment of a parameter of `joined` in float32."""
    if f"{which}_scale" not in entry:
        return entry[which]
    code = codec_named(DEFAULT_CODEC).code_of(ADAM.moment(which))
    return code.decode(entry[which], entry[f"{which}_scale"], 1.0)
