# SPDX-License-Identifier: Apache-2.0
"""Given the same gradients, every ZeRO layout steps as the plain optimizer does, bit for bit.

The gradients of `Bag` are functions of name and step.  What a rank holds is put together again by
parameter and compared with a single process that knows nothing of ZeRO; only blocks that a
partition boundary cuts may differ, as each side has a scale of its own.
"""

import deepspeed
import pytest
import torch
from convert_model import named_groups, unnamed_groups
from nests import difference
from params import each, layouts_to_run
from ranks import on_ranks
from zero_experts import EXPERT_LAYOUTS, expert_reference, step_experts
from zero_shards import assert_equals_plain, put_together
from zero_worker import Bag, config, held, make_engine, take_step

import zero8
from zero8.spec.codec import CODECS, DEFAULT_CODEC

STEPS = 4
TRAINED = tuple(name for name in Bag.SHAPES if name != "frozen")
FLOAT32 = ("bias", "single")  # fewer than two dimensions

# A scale under which all gradients here are exact, and none overflows.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
BF16_STATES = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}

LAYOUTS = {
    "zero1": config(stage=1, offload=None),
    "zero1 bf16, fp32 gradients": config(stage=1, offload=None, dtype={})
    | {"data_types": {"grad_accum_dtype": "fp32"}},
    "zero2 offload": config(stage=2),
    "zero2 offload, round robin": config(stage=2, zero={"round_robin_gradients": True}),
    "zero2 offload, bf16": config(stage=2, dtype={}),
    "zero2 offload, dynamic": config(stage=2, codec="dynamic", block_size=128),
    "zero2 offload, log6": config(stage=2, codec="log6"),
    "zero2 offload, linear4": config(stage=2, codec="linear4"),
    "zero2 offload, groups": config(stage=2),
    "zero2 offload, fp32 embedding": config(stage=2, fp32_params=["*embed*"]),
    "zero2 offload, bf16 masters": config(stage=2, dtype={"bf16_master_weights_and_grads": True}),
    "zero3 offload": config(stage=3),
    "zero3 offload, groups": config(stage=3),
    "zero3 offload, log6": config(stage=3, codec="log6"),
    "zero3 offload, linear4": config(stage=3, codec="linear4"),
    "zero3 offload, small sub-groups": config(stage=3, zero={"sub_group_size": 5000}),
    "zero3, under zero.Init": config(stage=3, offload=None),
    "zero3 offload, bf16 masters": config(stage=3, dtype={"bf16_master_weights_and_grads": True}),
    "zero1 aligned": config(stage=1, offload=None, zero={"parameter_alignment": True}),
    "zero1 fp16": config(stage=1, offload=None) | FP16,
    "zero2 all-reduce": config(stage=2, offload=None, zero={"reduce_scatter": False}),
    "zero2 offload, fp16": config(stage=2) | FP16,
    "zero2 offload, accumulated": config(stage=2) | {"gradient_accumulation_steps": 2},
    "zero3 offload, fp16": config(stage=3) | FP16,
    "zero3, bf16 states": config(stage=3, offload=None, dtype=BF16_STATES),
    "zero3 accumulated, all-reduce": config(stage=3, offload=None, zero={"reduce_scatter": False})
    | {"gradient_accumulation_steps": 2},
}
# For `make test-slow`: a quick layout takes the same way, with one setting more or another dtype.
SLOW = {
    "zero2 offload",
    "zero2 offload, dynamic",
    "zero2 offload, bf16",
    "zero2 offload, accumulated",
    "zero2 all-reduce",
    "zero3 offload",
    "zero3 offload, fp16",
    "zero3, bf16 states",
    "zero1 fp16",
    "zero0 bf16",
}
WITHOUT_ZERO = {
    "zero0": config(stage=0, offload=None),
    "zero0 bf16": config(stage=0, offload=None, dtype={}),
    "zero0 fp16": config(stage=0, offload=None) | FP16,
}
ON_FOUR_RANKS = {
    "zero1": LAYOUTS["zero1"],
    "zero1 bf16, fp32 gradients": LAYOUTS["zero1 bf16, fp32 gradients"],
    "zero2 offload, bf16": LAYOUTS["zero2 offload, bf16"],
    "zero2 offload, round robin": LAYOUTS["zero2 offload, round robin"],
    "zero3 offload, groups": LAYOUTS["zero3 offload, groups"],
    "zero3 offload, bf16 masters": LAYOUTS["zero3 offload, bf16 masters"],
    "zero3 hpz": config(stage=3, offload=None, dtype={}, zero={"zero_hpz_partition_size": 2}),
}
GROUPS = (
    {"names": ("embed", "long"), "lr": 2e-2, "weight_decay": 0.0, "betas": [0.8, 0.99]},
    {"names": ("wide", "bias", "thin", "frozen"), "weight_decay": 0.25, "eps": 1e-3},
    {"names": ("conv", "single", "unused"), "lr": 1e-3},
)


def halve_lr(optimizer):
    """Do what a learning-rate schedule does between steps."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def step_layouts(layouts):
    """Step a bag in every layout; return what this rank holds, by layout."""
    result = {}
    for name, ds_config in layouts.items():
        if "zero.Init" in name:
            with deepspeed.zero.Init(config_dict_or_path=ds_config):
                bag = Bag()
        else:
            bag = Bag()
        groups = unnamed_groups(bag, GROUPS) if "groups" in name else None
        engine = make_engine(ds_config, bag, groups)
        for step in range(STEPS):
            for _ in range(engine.gradient_accumulation_steps()):
                take_step(engine, step)
            halve_lr(engine.optimizer)
        result[name] = held(engine)
    return result


def tiny():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(1, 1), Mean())


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean()


@pytest.fixture(scope="module")
def two_ranks(request, standing_ranks):
    layouts = LAYOUTS | WITHOUT_ZERO
    layouts = {name: layouts[name] for name in layouts_to_run(request, layouts)}
    return standing_ranks(2).run(step_layouts, timeout_s=500, layouts=layouts)


@pytest.fixture(scope="module")
def four_ranks(standing_ranks):
    return standing_ranks(4).run(step_layouts, timeout_s=500, layouts=ON_FOUR_RANKS)


def reference(name, ds_config):
    """Return {parameter: (weights, its state)} of the plain optimizer."""
    # Gradients are computed in the model's precision and stepped in the masters'.
    low, bag = Bag(), Bag()
    if "fp16" in ds_config:
        low, bag = low.half(), bag.half().float()
    if ds_config.get("bf16", {}).get("bf16_master_weights_and_grads"):
        low, bag = low.bfloat16(), bag.bfloat16()
    params = named_groups(bag, groups=GROUPS) if "groups" in name else list(bag.named_parameters())
    optimizer = zero8.Adam8bitBlockwise(params, **ds_config["optimizer"]["params"])
    if name in ("zero0 bf16", "zero0 fp16"):
        # DeepSpeed's wrapper takes a step with zero gradients when it is made.
        for n in TRAINED:
            getattr(bag, n).grad = torch.zeros_like(getattr(bag, n))
        optimizer.step()
    for step in range(STEPS):
        low(step).backward()
        for n in TRAINED:
            p, grad = getattr(bag, n), getattr(low, n).grad
            # An unused one has zeros in ZeRO's flat gradients.
            p.grad = torch.zeros_like(p) if grad is None else grad.to(p.dtype)
            if name == "zero0 fp16":
                # DeepSpeed 0.19.8 divides by the loss scale, but has not multiplied by it.
                p.grad /= 2**8
        low.zero_grad()
        optimizer.step()
        halve_lr(optimizer)
    return {n: (getattr(bag, n).detach(), optimizer.state[getattr(bag, n)]) for n in TRAINED}


def bits_of(ds_config):
    """Return the bits of a code."""
    return CODECS[ds_config["optimizer"]["params"].get("codec", DEFAULT_CODEC)].of_signed.bits


def assert_equals_reference(ranks, name, ds_config, cut_per_param):
    """Compare what the ranks hold with the plain optimizer, where blocks are whole."""
    block_size = ds_config["optimizer"]["params"].get("block_size", 256)
    made = put_together(ranks, block_size, bits_of(ds_config))
    assert_equals_plain(made, reference(name, ds_config), block_size, cut_per_param)
    return made


@each(LAYOUTS, SLOW)
def test_layout_on_two_ranks_equals_plain_optimizer_in_uncut_blocks(two_ranks, name):
    """Two ranks make one boundary within a flat group or a parameter: one cut block at most."""
    ranks = [layouts[name] for layouts in two_ranks]
    made = assert_equals_reference(ranks, name, LAYOUTS[name], cut_per_param=1)
    expected = [*FLOAT32, "embed"] if "fp32 embedding" in name else FLOAT32
    assert sorted(p for p in made if "exp_avg_scale" not in made[p]) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_layout_on_four_ranks_equals_plain_optimizer_in_uncut_blocks(four_ranks, name):
    ranks = [layouts[name] for layouts in four_ranks]
    assert_equals_reference(ranks, name, ON_FOUR_RANKS[name], cut_per_param=3)


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_experts_on_two_ranks_equal_plain_optimizer_in_uncut_blocks(name, standing_ranks):
    ranks = standing_ranks(2).run(step_experts, name=name, steps=STEPS)
    made = put_together(ranks, block_size=256)
    assert_equals_plain(made, expert_reference(name, STEPS), 256, cut_per_param=1)
    for rank in ranks:
        assert any("moe" in keys and "name" in keys for keys in rank["group keys"])


def assert_each_equals_reference(ranks, name):
    """Compare what every rank holds without ZeRO with the plain optimizer."""
    expected = reference(name, WITHOUT_ZERO[name])
    for rank in ranks:
        states = rank["states"]
        assert len(states) == len(expected)
        for state, (weights, plain_state) in zip(states, expected.values(), strict=True):
            assert difference(state.pop("master"), weights) == ""
            assert difference(state, plain_state) == ""


@each(WITHOUT_ZERO, SLOW)
def test_layout_without_zero_equals_plain_optimizer_on_each_rank(two_ranks, name):
    assert_each_equals_reference([layouts[name] for layouts in two_ranks], name)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_rank_that_holds_only_padding_steps_saves_and_loads(stage, tmp_path):
    """Two elements: ZeRO 1 and 2 pad a group to 4, so rank 1 gets padding; so does it in ZeRO 3,
    where each parameter of one element is cut in two."""
    model, one = tiny(), torch.ones(4, 1)
    optimizer = zero8.Adam8bitBlockwise(model.parameters(), lr=1e-2, weight_decay=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(one).backward()
        optimizer.step()
    expected = dict(model.named_parameters())

    engine, loaded = (make_engine(config(stage=stage), tiny()) for _ in range(2))
    for _ in range(2):
        take_step(engine, one)
    engine.save_checkpoint(tmp_path)
    loaded.load_checkpoint(tmp_path)
    for stepped in (engine, loaded):
        take_step(stepped, one)
        (state,) = held(stepped)["states"]
        assert state["step"] == 3
        assert len(state["pieces"]) == (2 if engine.global_rank == 0 else 0)
        for piece in state["pieces"]:
            assert state["master"][piece.start] == expected[piece.name].item()
