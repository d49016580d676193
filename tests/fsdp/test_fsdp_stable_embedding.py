# SPDX-License-Identifier: Apache-2.0
"""A StableEmbedding keeps float32 moments under FSDP2, which exchanges its parameters."""

import pytest
import torch
from fsdp_worker import start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from zero8 import Adam8bitBlockwise, StableEmbedding

ROWS = 90


def tied(device=None) -> nn.Sequential:
    """Return a net whose last layer has the weight of the first."""
    layers = [nn.Linear(64, 64, device=device), nn.Linear(64, ROWS, bias=False, device=device)]
    model = nn.Sequential(StableEmbedding(ROWS, 64, device=device), *layers)
    model[2].weight = model[0].weight
    return model


def optimizer_of(model):
    return Adam8bitBlockwise(model.named_parameters(), lr=0.01, weight_decay=0.0)


def made(way):
    """Return a model under FSDP2, with its optimizer."""
    options = {"mesh": init_device_mesh("cpu", (torch.distributed.get_world_size(),))}
    if way == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = tied("meta" if way == "meta" else None)
    if way == "made before":  # as Accelerate makes it
        optimizer = optimizer_of(model)
        (group,) = optimizer.param_groups
        group["params"] = [torch.empty(1) for _ in group["params"]]
        group["params"] = list(fully_shard(model, **options).parameters())
        return model, optimizer
    fully_shard(model, **options)
    if way == "meta":
        model.to_empty(device="cpu")
        for layer in model:
            layer.reset_parameters()
    if way == "unsharded":  # it holds whole parameters between backward and step
        model.set_reshard_after_backward(False)
    return model, optimizer_of(model)


def reported(way):
    """Return bits, reason and elements of each parameter's moments after a step."""
    start()
    model, optimizer = made(way)
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    return {row.name: (row.bits, row.reason, row.numel) for row in optimizer.memory_report().rows}


@pytest.mark.parametrize("way", ["offload", "meta", "made before", "unsharded"])
def test_fsdp2_stable_embedding_has_float32_moments_on_all_ranks(way, standing_ranks):
    ranks = standing_ranks(2).run(reported, way=way)
    rows = [rank["0.weight"] for rank in ranks]
    assert {row[:2] for row in rows} == {(32, "in a StableEmbedding")}
    assert sum(row[2] for row in rows) == ROWS * 64
    assert {rank["1.weight"][0] for rank in ranks} == {8}
