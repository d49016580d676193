# SPDX-License-Identifier: Apache-2.0
"""Planned bytes are those that optimizers and DeepSpeed's engines hold."""

from dataclasses import replace

import pytest
import torch
from plan_worker import BUCKET, SUB_GROUP, Stack, config_of, held_by_engines, held_by_fsdp2

import zero8
from zero8.plan.memory import rows_of, total
from zero8.plan.model import Model
from zero8.plan.setup import HOST, NVME, Setup, with_deepspeed_config
from zero8.plan.share import share_of
from zero8.spec.codec import CODECS

BF16_MASTERS = {"bf16_master_weights_and_grads": True}
# Stage, offload, section of bf16, optimizer, accumulation steps, weight_correction_bits, offload of
# parameters.
CASES = {
    "zero1 offload": (1, "cpu", {}, "Adam8bitBlockwise", 1),
    "zero2 offload": (2, "cpu", {}, "Adam8bitBlockwise", 1),
    "zero2 offload, bf16 masters": (2, "cpu", BF16_MASTERS, "Adam8bitBlockwise", 1),
    "zero2 offload, 24-bit masters": (2, "cpu", BF16_MASTERS, "Adam8bitBlockwise", 1, 8),
    "zero2 offload, AdamW": (2, "cpu", {}, "AdamW", 1),
    "zero2": (2, None, {}, "Adam8bitBlockwise", 1),
    "zero3 offload": (3, "cpu", {}, "Adam8bitBlockwise", 1),
    "zero3 offload, bf16 masters": (3, "cpu", BF16_MASTERS, "Adam8bitBlockwise", 1, 0, "cpu"),
    "zero3 offload, accumulated": (3, "cpu", BF16_MASTERS, "Adam8bitBlockwise", 2, 0, "cpu"),
    "zero3 offload, AdamW": (3, "cpu", {}, "AdamW", 1),
    "zero3": (3, None, {}, "Adam8bitBlockwise", 1),
    "zero2 offload, Muon": (2, "cpu", {}, "Muon8bitBlockwise", 1),
    "zero3 offload, Muon": (3, "cpu", {}, "Muon8bitBlockwise", 1),
}
QUICK = ("zero2 offload", "zero2 offload, Muon", "zero3 offload, bf16 masters", "zero3")
# What is there only while a step is taken, or a backward, or on a real GPU alone.
PASSING = {
    ("zero2", "gradients of the step"),
    ("zero3", "gradients of the step"),
    ("zero2", "gradients"),
    ("zero1 offload", "gradients"),
}
WITHIN = 0.05


def model_of(module) -> Model:
    return Model("", tuple((name, tuple(p.shape)) for name, p in module.named_parameters()))


def planned(case, world_size):
    """Return by name what is planned; of two rows of one name, on GPU and host, the host's."""
    setup = with_deepspeed_config(Setup(world_size=world_size), config_of(*CASES[case]))
    is_fp32 = CASES[case][3] == "AdamW"
    rows = sorted(rows_of(model_of(Stack()), setup), key=lambda row: row.place == HOST)
    return {row.what: row.fp32_bytes if is_fp32 else row.zero8_bytes for row in rows}


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, QUICK),
        *(pytest.param(size, tuple(CASES), marks=pytest.mark.slow) for size in (1, 2)),
    ],
    ids=["2, some", "1", "2"],
)
def test_plan_of_deepspeed_is_within_5_percent_of_what_engines_hold(
    standing_ranks, world_size, cases
):
    engines = {case: CASES[case] for case in cases}
    ranks = standing_ranks(world_size).run(held_by_engines, timeout_s=400, cases=engines)
    wrong, compared = [], 0
    for case in cases:
        expected = planned(case, world_size)
        # The plan is of the rank that holds most.
        held = {what: max(rank[case].get(what, 0) for rank in ranks) for what in expected}
        unplanned = set().union(*(rank[case] for rank in ranks)) - set(expected)
        wrong += [(case, what, "not planned") for what in unplanned]
        for what, num_bytes in expected.items():
            passing = (case, what) in PASSING or what.startswith(("buckets", "gathered"))
            if not passing or held[what]:
                compared += 1
                if abs(num_bytes - held[what]) > WITHIN * held[what]:
                    wrong.append((case, what, num_bytes, held[what]))
    assert wrong == []
    assert compared > 5 * len(cases)


FSDP2 = {
    "fp32": (torch.float32, {}),
    "bf16-masters": (torch.bfloat16, {}),
    "24-bit-masters": (torch.bfloat16, {"weight_correction_bits": 8}),
}


def test_plan_of_fsdp2_is_exactly_what_its_first_rank_holds(standing_ranks):
    held, _ = standing_ranks(2).run(held_by_fsdp2, cases=FSDP2)
    for dtype in FSDP2:
        rows = rows_of(model_of(Stack()), Setup(engine="fsdp2", dtype=dtype, world_size=2))
        assert held[dtype] == {row.what: row.zero8_bytes for row in rows}, dtype


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("dtype", "each"), [("bf16", 4), ("fp32", 4), ("bf16-masters", 2)])
def test_plan_of_int8_weights_counts_a_byte_and_a_scale_per_row_of_linear_layers(
    world_size, dtype, each
):
    setup = Setup(engine="fsdp2", dtype=dtype, world_size=world_size)
    plain = {row.what: row for row in rows_of(model_of(Stack()), setup)}
    int8 = {row.what: row for row in rows_of(model_of(Stack()), replace(setup, weights="int8"))}
    layers = [part for part in Stack().modules() if isinstance(part, torch.nn.Linear)]
    saved = sum((each - 1) * layer.weight.numel() - each * len(layer.weight) for layer in layers)
    weights = int8.pop("weights")
    assert weights.zero8_bytes == weights.fp32_bytes
    assert plain.pop("weights").zero8_bytes - weights.zero8_bytes == saved // world_size
    assert int8 == plain


OPTIMIZERS = [("Adam", {"codec": codec, "block_size": 128}) for codec in CODECS]
OPTIMIZERS += [("Adam", {}), ("Lion", {}), ("SGD", {"momentum": 0.9}), ("AdEMAMix", {})]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_plan_of_one_process_is_exactly_what_the_optimizer_holds(name, options):
    module, kind = Stack(), f"{name}8bitBlockwise"
    optimizer = getattr(zero8, kind)(module.parameters(), **options)
    module(torch.zeros(1, 1, dtype=torch.int64)).backward()
    optimizer.step()
    held = sum(row.state_bytes for row in optimizer.memory_report().rows)
    config = {"optimizer": {"type": kind, "params": options}, "zero_optimization": {"stage": 0}}
    share = share_of(model_of(module), with_deepspeed_config(Setup(), config))
    assert share.zero8_bytes == held
    moments = len(optimizer.algorithm.moment_names)
    assert share.fp32_bytes == 4 * moments * model_of(module).numel


def test_plan_of_nvme_has_masters_gradients_and_moments_there():
    setup = Setup(stage=3, offload="nvme", sub_group_numel=SUB_GROUP, reduce_bucket_numel=BUCKET)
    model = model_of(Stack())
    share, rows = share_of(model, setup), rows_of(model, setup)
    masters = 2 * 4 * model.numel
    assert total(rows, NVME) == (masters + share.fp32_bytes, masters + share.zero8_bytes)
    pipelined = rows_of(model, replace(setup, pipelined=True))
    names = ("buffers of swapping", "buffers of 8-bit states")
    few, many = ({r.what: r.zero8_bytes for r in rs if r.what in names} for rs in (rows, pipelined))
    assert few["buffers of swapping"] == many["buffers of swapping"] == 4 * 4 * SUB_GROUP
    assert many[names[1]] == pytest.approx(3 * few[names[1]], abs=3)
