# SPDX-License-Identifier: Apache-2.0
"""A StableEmbedding keeps float32 moments under ZeRO, whose optimizer sees flat partitions."""

import deepspeed
import pytest
import torch
from nests import difference
from torch import nn
from zero_worker import (
    base_optimizer,
    batch,
    config,
    make_engine,
    take_step,
    through_and_resumed,
)

from zero8 import Adam8bitBlockwise, StableEmbedding

QUICK = ("no zero, bf16", "zero2 offload, bf16", "zero3 offload")
LAYOUTS = {
    "no zero": config(stage=0, offload=None),
    "no zero, bf16": config(stage=0, offload=None, dtype={}),
    "zero1": config(stage=1, offload=None),
    "zero2 offload": config(),
    "zero2 offload, bf16": config(dtype={}),
    "zero2 offload, bf16 masters": config(dtype={"bf16_master_weights_and_grads": True}),
    "zero3 offload": config(stage=3),
    "zero3 offload, bf16": config(stage=3, dtype={}),
    "lion": config(optimizer="Lion8bitBlockwise"),
}
STEPS = 3
SHAPE = (67, 96)


class Tied(nn.Module):
    """A net whose last layer has the weight of the first."""

    def __init__(self, layer=StableEmbedding):
        super().__init__()
        self.inner = nn.Linear(96, 96)  # another weight is first in the partitions
        self.embed = layer(*SHAPE)
        self.head = nn.Linear(96, 67, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, targets):
        logits = self.head(torch.tanh(self.inner(self.embed(tokens))))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def engine_of(ds_config, model=None, **options):
    torch.manual_seed(7)
    return make_engine(ds_config, model or Tied(), **options)


def train(engine, is_on=False):
    first = STEPS * is_on
    return [take_step(engine, *batch(step)) for step in range(first, first + STEPS)]


def report_of(engine):
    rows = base_optimizer(engine).memory_report().rows
    return {row.name: (row.bits, row.reason, row.numel) for row in rows}


def trained_and_resumed(name, folder):
    """Return reports of a run and of a resumed one, and how their bits differ."""
    engines = []

    def make():
        engines.append(engine_of(LAYOUTS[name]))
        return engines[-1]

    through, resumed = through_and_resumed(make, train, folder)
    return *map(report_of, engines), difference(through, resumed)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in LAYOUTS]
)
def test_zero_stable_embedding_has_float32_moments_and_resumes_with_the_same_bits(
    name, standing_ranks, tmp_path
):
    folder = str(tmp_path)
    ranks = standing_ranks(2).run(trained_and_resumed, name=name, folder=folder, timeout_s=300)
    reports = [report for report, _, _ in ranks]
    stable = [report["embed.weight"] for report in reports if "embed.weight" in report]
    assert {row[:2] for row in stable} == {(32, "in a StableEmbedding")}
    replicas = 2 if name.startswith("no zero") else 1
    assert sum(numel for _, _, numel in stable) == replicas * SHAPE[0] * SHAPE[1]
    assert {report["inner.weight"][0] for report in reports if "inner.weight" in report} == {8}
    for report, resumed, different in ranks:
        assert resumed == report and different == ""


def other_ways():
    """Return reports of engines that get their optimizer, or their model, in another way."""
    found = {}
    torch.manual_seed(7)
    model = Tied()
    optimizer = Adam8bitBlockwise(model.parameters(), weight_decay=0.0)
    ds_config = config() | {"zero_force_ds_cpu_optimizer": False}
    del ds_config["optimizer"]
    found["client"] = engine_of(ds_config, model, optimizer=optimizer)
    found["callable"] = engine_of(
        ds_config, optimizer=lambda groups: Adam8bitBlockwise(groups, weight_decay=0.0)
    )
    with deepspeed.zero.Init(config_dict_or_path=config(stage=3, dtype={})):
        model = Tied()
    found["zero.Init"] = engine_of(config(stage=3, dtype={}), model)
    result = {}
    for name, engine in found.items():
        train(engine)
        result[name] = list(report_of(engine).values())
    return result


def test_zero_stable_embedding_has_float32_moments_however_the_engine_is_made(standing_ranks):
    ranks = standing_ranks(2).run(other_ways, timeout_s=300)
    for name in ("client", "callable", "zero.Init"):
        rows = [row for rank in ranks for row in rank[name]]
        numel = sum(row[2] for row in rows if row[1] == "in a StableEmbedding")
        assert numel == SHAPE[0] * SHAPE[1], name
        assert {bits for bits, reason, _ in rows if reason == "in a StableEmbedding"} == {32}
