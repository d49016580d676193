# SPDX-License-Identifier: Apache-2.0
"""The model of muon_worker.py under FSDP2, its steps and checkpoints, and what came of it."""

from pathlib import Path

import torch
from fsdp_checkpoints import load, save
from fsdp_worker import whole
from muon_worker import Known, optimizer_of, results
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from examples.gpt.engines import join_ranks


def by_rows(p: nn.Parameter) -> Shard | None:
    """Return the placement that gives each rank rows of all experts."""
    return Shard(1) if p.dim() == 3 else None


def sharded(offload: bool = False, replicas: int = 1, placement_of=None) -> nn.Module:
    device = join_ranks().type
    world_size = torch.distributed.get_world_size()
    sizes = (replicas, world_size // replicas)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicas", "shards"))
    mesh = mesh if replicas > 1 else mesh["shards"]
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    return fully_shard(Known(), mesh=mesh, shard_placement_fn=placement_of, **policy)


def run(model, optimizer, begin: int, end: int, late: str = "") -> None:
    for step in range(begin, end):
        model(step, late if step == 0 else "").backward()
        with torch.autocast("cpu", torch.bfloat16):  # which must not change what it computes
            optimizer.step()
        optimizer.zero_grad()


def codes(optimizer) -> dict:
    """Return the saved states, whole."""
    return {
        number: {key: whole(value) for key, value in state.items()}
        for number, state in optimizer.state_dict()["state"].items()
    }


def through(folder: Path) -> tuple:
    """Return what was saved after 2 steps, and what there is after 2 more."""
    model = sharded()
    optimizer = optimizer_of(model)
    run(model, optimizer, 0, 2)
    save(model, optimizer, "sharded", folder)
    saved = codes(optimizer)
    run(model, optimizer, 2, 4)
    return saved, codes(optimizer), results(model, optimizer)


def resumed(folder: Path) -> tuple:
    """Return what was loaded, and what there is after 2 more steps."""
    model = sharded()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = optimizer_of(model, lr=7.0)
    load(model, optimizer, "sharded", folder)
    loaded = codes(optimizer)
    run(model, optimizer, 2, 4)
    return loaded, codes(optimizer), results(model, optimizer)
