# SPDX-License-Identifier: Apache-2.0
"""Save, load, go on: bit for bit as if nothing had happened, with every algorithm.

Every cell of test_zero_matrix.py resumes with Adam, and the jobs of test_zero_faults.py do in fresh
processes.
"""

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import stage_1_and_2
from muon_in_zero import LAYOUTS as OF_MUON
from muon_in_zero import MUON
from muon_worker import Known
from nests import assert_same
from params import each
from ranks import on_ranks
from torch import nn
from zero_worker import (
    LION,
    MIX,
    SGD,
    Model,
    base_optimizer,
    batch,
    config,
    make_engine,
    take_step,
    through_and_resumed,
    train,
)

import zero8
from zero8.deepspeed import mapped, seams

STEPS = 3
CLIPPED = {"gradient_clipping": 1.0}
MASTERS = {"bf16_master_weights_and_grads": True}
EMBEDDING = (67, 96)


class Tied(nn.Module):
    """A net whose last layer has the weight of the first."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(96, 96)  # another weight is first in the partitions
        self.embed = zero8.StableEmbedding(*EMBEDDING)
        self.head = nn.Linear(96, 67, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, targets):
        logits = self.head(torch.tanh(self.inner(self.embed(tokens))))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


QUICK = {
    "lion, zero2 offload, bf16": (config(dtype={}, **LION), Model),
    "lion, zero3 offload": (config(3, **LION), Model),
    "sgd, zero2 offload, bf16": (config(dtype={}, **SGD), Model),
    "mix, zero3 offload": (config(3, **MIX), Model),
    "muon, zero2 offload": (OF_MUON["zero2 offload"], Known),
    "embedding, no zero, bf16": (config(0, None, dtype={}), Tied),
    "embedding, zero2 offload, bf16": (config(dtype={}), Tied),
    "embedding, zero3 offload": (config(3), Tied),
}
SLOW = {
    "lion, no zero": (config(0, None, **LION), Model),
    "lion, zero1": (config(1, None, **LION), Model),
    "sgd, no zero": (config(0, None, **SGD), Model),
    "sgd, zero3 offload": (config(3, **SGD), Model),
    "mix, zero2 offload, bf16": (config(dtype={}, **MIX), Model),
    "muon, zero2 offload, bf16": (config(dtype={}, **MUON), Known),
    "muon, zero1": (OF_MUON["zero1"], Known),
    "muon, zero3 offload, parts": (OF_MUON["zero3 offload, parts"], Known),
    "embedding, zero1": (config(1, None), Tied),
    "embedding, zero2 offload, bf16 masters": (config(dtype=MASTERS), Tied),
    "embedding, zero3 offload, bf16": (config(3, dtype={}), Tied),
    "embedding, lion": (config(**LION), Tied),
}
CASES = QUICK | SLOW


@each(CASES, SLOW)
@on_ranks(2)
def test_zero_algorithm_resumes_with_the_same_bits(name, tmp_path):
    (ds_config, model), engines = CASES[name], []

    def make():
        torch.manual_seed(7)
        engines.append(make_engine(ds_config | CLIPPED, model()))
        return engines[-1]

    def steps(engine, is_on):
        numbers = range(STEPS * is_on, STEPS * (1 + is_on))
        inputs = [(step,) if model is Known else batch(step) for step in numbers]
        return [take_step(engine, *one) for one in inputs]

    through, resumed = through_and_resumed(make, steps, tmp_path)
    assert_same(through, resumed)
    assert_same(*map(report_of, engines))
    assert len(set(through["losses"])) == STEPS
    if model is Tied:
        assert_float32_embedding(engines[0], replicas=2 if "no zero" in name else 1)


def report_of(engine):
    rows = base_optimizer(engine).memory_report().rows
    return [(row.name, row.bits, row.reason, row.numel) for row in rows]


def assert_float32_embedding(engine, replicas=1):
    """Check that the moments of a StableEmbedding are float32, and those of its net 8-bit."""
    reports = [None, None]
    torch.distributed.all_gather_object(reports, report_of(engine))
    rows = [row for report in reports for row in report]
    stable = [(bits, numel) for _, bits, why, numel in rows if why == "in a StableEmbedding"]
    assert {bits for bits, _ in stable} == {32}
    assert sum(numel for _, numel in stable) == replicas * EMBEDDING[0] * EMBEDDING[1]
    assert {bits for name, bits, *_ in rows if name == "inner.weight"} <= {8}


@pytest.mark.parametrize("way", ["client", "callable", "zero.Init"])
@on_ranks(2)
def test_zero_stable_embedding_has_float32_moments_however_the_engine_is_made(way):
    ds_config, optimizer = config() | {"zero_force_ds_cpu_optimizer": False}, None
    model = Tied()
    if way == "zero.Init":
        ds_config = config(3, dtype={})
        with deepspeed.zero.Init(config_dict_or_path=ds_config):
            model = Tied()
    elif way == "callable":
        optimizer = zero8.Adam8bitBlockwise
    else:
        optimizer = zero8.Adam8bitBlockwise(model.parameters(), weight_decay=0.0)
    if optimizer is not None:
        del ds_config["optimizer"]
    engine = make_engine(ds_config, model, optimizer=optimizer)
    train(engine, 1)
    assert_float32_embedding(engine)


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("numel", [0, 2, 3, 7])
def test_mapped_master_weights_are_copied_in_parts_and_padded(numel, padding, monkeypatch):
    seams.install()
    monkeypatch.setattr(mapped, "_PART_NUMEL", 3)
    saved, released = torch.randn(numel, requires_grad=True), []
    ours = mapped.MappedMasters.of(saved, lambda: released.append(None))
    current = nn.Parameter(torch.ones(numel + padding))
    # The two lines of DeepSpeed's load.
    source = stage_1_and_2._get_padded_tensor(ours, current.numel())
    current.data.copy_(source.data)
    assert source is ours
    assert torch.equal(current, torch.cat([saved, torch.zeros(padding)]))
    assert len(released) == max(1, -(-numel // 3))
    assert type(ours.clone()) is torch.Tensor
