# SPDX-License-Identifier: Apache-2.0
"""ZeRO checkpoints written by hand: what DeepSpeed's converter reads, of two matrices."""

from collections import OrderedDict

import torch
from deepspeed.utils.tensor_fragment import fragment_address

SHAPES = OrderedDict(first=(3, 4), second=(5, 2))
NUMEL = 22
ENTRIES = ("exp_avg", "exp_avg_sq", "fp32")


def values(entry, name):
    """Return what a parameter's entry is, in one dimension."""
    numel = SHAPES[name][0] * SHAPES[name][1]
    return torch.arange(numel, dtype=torch.float32) + 100 * ENTRIES.index(entry) + len(name)


def write(folder, stage=2, ranks=2, tag="saved"):
    """Write a checkpoint of steps 7, all in one parameter group, and the file latest."""
    place = folder / tag
    place.mkdir(parents=True)
    (folder / "latest").write_text(tag)
    model = {
        "module": {name: torch.zeros(shape) for name, shape in SHAPES.items()},
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in SHAPES.items())],
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        "ds_config": {"zero_optimization": {"stage": stage}},
    }
    for rank in range(ranks):
        if stage == 3 or rank == 0:
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            torch.save(model, place / f"{prefix}mp_rank_00_model_states.pt")
        states = stage3_states(rank, ranks) if stage == 3 else stage2_states(rank, ranks)
        path = place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": {"zero_stage": stage, **states}}, path)
    return place


def stage2_states(rank, ranks):
    """Return what a rank of stage 2 saves: a piece of the parameters in a row."""
    size = -(-NUMEL // ranks)
    begin, end = rank * size, min((rank + 1) * size, NUMEL)
    flat = {e: torch.cat([values(e, name) for name in SHAPES])[begin:end] for e in ENTRIES}
    mapping, start = OrderedDict(), 0
    for name, (rows, columns) in SHAPES.items():
        low, high = max(start, begin), min(start + rows * columns, end)
        if low < high:
            mapping[name] = fragment_address(numel=high - low, start=low - begin)
        start += rows * columns
    return {
        "base_optimizer_state": base_state(flat),
        "single_partition_of_fp32_groups": [flat["fp32"]],
        "param_slice_mappings": [mapping],
        "group_paddings": [0],
        "partition_count": [ranks],
        "ds_version": "0.19.8",
    }


def stage3_states(rank, ranks):
    """Return what a rank of stage 3 saves: a piece of every parameter."""

    def piece(entry, name):
        whole = values(entry, name)
        size = -(-len(whole) // ranks)
        padded = torch.cat([whole, torch.zeros(size * ranks - len(whole))])
        return padded[rank * size : (rank + 1) * size]

    flat = {e: torch.cat([piece(e, name) for name in SHAPES]) for e in ENTRIES}
    return {"optimizer_state_dict": base_state(flat), "fp32_flat_groups": [flat["fp32"]]}


def base_state(flat):
    """Return an Adam's state dict."""
    state = {"step": 7, "exp_avg": flat["exp_avg"], "exp_avg_sq": flat["exp_avg_sq"]}
    return {"state": {0: state}, "param_groups": [{"lr": 0.5, "params": [0]}]}


def change(path, edit):
    """Have `edit` change what a file of a checkpoint holds."""
    held = torch.load(path, weights_only=False)
    edit(held)
    torch.save(held, path)
