# SPDX-License-Identifier: Apache-2.0
"""Save, load, go on: bit for bit as if nothing had happened, with every algorithm.

Every cell of test_zero_matrix.py resumes with Adam, and the jobs of test_zero_faults.py do in fresh
processes.
"""

import deepspeed
import pytest
import torch
from muon_in_zero import LAYOUTS as OF_MUON
from muon_in_zero import MUON
from muon_worker import Known
from nests import difference
from torch import nn
from zero_worker import (
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

STEPS = 3
CLIPPED = {"gradient_clipping": 1.0}
MASTERS = {"bf16_master_weights_and_grads": True}
LION = {"optimizer": "Lion8bitBlockwise"}
SGD = {"optimizer": "SGD8bitBlockwise", "momentum": 0.9, "nesterov": True, "lr": 0.1}
MIX = {"optimizer": "AdEMAMix8bitBlockwise", "t_alpha": 4, "t_beta3": 4}
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


def report_of(engine):
    rows = base_optimizer(engine).memory_report().rows
    return {row.name: (row.bits, row.reason, row.numel) for row in rows}


def run_through_and_resumed(name, folder):
    """Return what both runs held, their reports, and the entries of the states."""
    (ds_config, model), engines = CASES[name], []

    def make():
        torch.manual_seed(7)
        engines.append(make_engine(ds_config | CLIPPED, model()))
        return engines[-1]

    def steps(engine, is_on):
        numbers = range(STEPS * is_on, STEPS * (1 + is_on))
        inputs = [(step,) if model is Known else batch(step) for step in numbers]
        return [take_step(engine, *one) for one in inputs]

    runs = through_and_resumed(make, steps, folder, "saved")
    entries = [set(state) for state in base_optimizer(engines[-1]).state.values() if state]
    return runs, [report_of(engine) for engine in engines], entries


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_zero_algorithm_resumes_with_the_same_bits(name, standing_ranks, tmp_path):
    ds_config, model = CASES[name]
    ranks = standing_ranks(2).run(run_through_and_resumed, name=name, folder=str(tmp_path))
    algorithm = getattr(zero8, ds_config["optimizer"]["type"]).algorithm
    for (through, resumed), (report, resumed_report), all_entries in ranks:
        assert difference(through, resumed) == "" and report == resumed_report
        assert len(set(through["losses"])) == STEPS and all_entries
        for entries in all_entries if model is not Known else ():
            found = {entry.removesuffix("_q8").removesuffix("_scale") for entry in entries}
            known = {"step", "format", *(one.name for one in algorithm.memory)}
            assert found - known == set(algorithm.moment_names)
    if model is Tied:
        replicas = 2 if "no zero" in name else 1
        assert_float32_embedding([report for _, (report, _), _ in ranks], replicas)


# --- A StableEmbedding, whose moments are float32 ------------------------------------------------


def assert_float32_embedding(reports, replicas):
    rows = [row for report in reports for row in report.values()]
    stable = [(bits, numel) for bits, why, numel in rows if why == "in a StableEmbedding"]
    assert {bits for bits, _ in stable} == {32}
    assert sum(numel for _, numel in stable) == replicas * EMBEDDING[0] * EMBEDDING[1]
    assert {report["inner.weight"][0] for report in reports if "inner.weight" in report} <= {8}


def other_ways():
    """Return reports of engines that get their optimizer, or their model, in another way."""
    ds_config = config() | {"zero_force_ds_cpu_optimizer": False}
    del ds_config["optimizer"]
    model = Tied()
    client = zero8.Adam8bitBlockwise(model.parameters(), weight_decay=0.0)
    with deepspeed.zero.Init(config_dict_or_path=config(3, dtype={})):
        cut = Tied()
    engines = {
        "client": make_engine(ds_config, model, optimizer=client),
        "callable": make_engine(
            ds_config, Tied(), optimizer=lambda groups: zero8.Adam8bitBlockwise(groups)
        ),
        "zero.Init": make_engine(config(3, dtype={}), cut),
    }
    for engine in engines.values():
        train(engine, 1)
    return {name: report_of(engine) for name, engine in engines.items()}


def test_zero_stable_embedding_has_float32_moments_however_the_engine_is_made(standing_ranks):
    ranks = standing_ranks(2).run(other_ways)
    for name in ranks[0]:
        # Without names a row has its shape.
        reports = [{f"{k}": row for k, row in rank[name].items()} for rank in ranks]
        assert_float32_embedding(reports, replicas=1)
