# SPDX-License-Identifier: Apache-2.0
"""A StableEmbedding keeps float32 moments under FSDP2, which exchanges its parameters."""

import pytest
import torch
from fsdp_worker import start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from zero8 import Adam8bitBlockwise, StableEmbedding

SHAPE = (90, 64)
FLOAT32 = 32, "in a StableEmbedding"
WAYS = ("offload", "meta", "made before", "unsharded")


class Tied(nn.Module):
    """A net whose last layer has the weight of the first; one row stays on the first rank."""

    def __init__(self, device=None):
        super().__init__()
        self.embed = StableEmbedding(*SHAPE, device=device)
        self.inner = nn.Linear(64, 64, device=device)
        self.head = nn.Linear(64, 90, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.one_row = StableEmbedding(1, 5000, device=device)

    def forward(self, tokens):
        logits = self.head(self.inner(self.embed(tokens)))
        return logits.square().mean() + self.one_row(tokens * 0).square().mean()


def optimizer_of(model):
    return Adam8bitBlockwise(model.named_parameters(), lr=0.01, weight_decay=0.0)


def made(way):
    """Return a model under FSDP2, with its optimizer."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    options = {"mesh": mesh}
    if way == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if way == "meta":
        model = fully_shard(Tied(device="meta"), **options)
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return model, optimizer_of(model)
    model = Tied()
    if way == "made before":  # as Accelerate makes it
        optimizer = optimizer_of(model)
        (group,) = optimizer.param_groups
        group["params"] = [torch.empty(1) for _ in group["params"]]
        group["params"] = list(fully_shard(model, **options).parameters())
        return model, optimizer
    optimizer = optimizer_of(fully_shard(model, **options))
    if way == "unsharded":  # it holds whole parameters between backward and step
        model.set_reshard_after_backward(False)
    return model, optimizer


def reported(way):
    """Return bits, reason and elements of each parameter's moments after a step."""
    start()
    model, optimizer = made(way)
    model(torch.arange(8)).backward()
    optimizer.step()
    return {row.name: (row.bits, row.reason, row.numel) for row in optimizer.memory_report().rows}


@pytest.mark.parametrize("way", WAYS)
def test_fsdp2_stable_embedding_has_float32_moments_on_all_ranks(way, standing_ranks):
    ranks = standing_ranks(2).run(reported, way=way)
    for name, shape in (("embed.weight", SHAPE), ("one_row.weight", (1, 5000))):
        rows = [rank[name] for rank in ranks]
        assert {row[:2] for row in rows} == {FLOAT32}
        assert sum(row[2] for row in rows) == shape[0] * shape[1]
    assert ranks[1]["one_row.weight"][2] == 0
    assert {rank["inner.weight"][0] for rank in ranks} == {8}
