# SPDX-License-Identifier: Apache-2.0
import pytest

from zero8.spec.grid import BlockGrid
from zero8.state.policy import Policy

DECISIONS = {
    "linear": ((33, 200), True, "33 rows x 1 blocks"),
    "experts": ((5, 12, 300), True, "60 rows x 2 blocks"),
    "large conv": ((64, 16, 3, 3), True, "64 rows x 1 blocks"),
    "exactly 4096 elements": ((64, 64), True, "64 rows x 1 blocks"),
    "4095 elements": ((63, 65), False, "fewer elements than min_8bit_size"),
    "vector": ((50_000,), False, "1-dimensional"),
    "empty": ((0, 5000), False, "fewer elements than min_8bit_size"),
    "depthwise conv": ((4000, 1, 3, 3), True, "143 blocks of 28 rows"),
    "few narrow rows": ((400, 8), False, "fewer elements than min_8bit_size"),
}


@pytest.mark.parametrize(("shape", "is_8bit", "reason"), DECISIONS.values(), ids=DECISIONS)
def test_policy_shape_decides_and_says_why(shape, is_8bit, reason):
    decision = Policy().decide("any", shape)
    assert decision.grid == (BlockGrid.of(shape, 256) if is_8bit else None)
    assert decision.reason == reason
    assert Policy().decide(None, shape) == decision


def test_policy_rows_without_elements_stay_float32_at_any_smallest_size():
    decision = Policy(min_8bit_size=0).decide(None, (300, 0))
    assert (decision.grid, decision.reason) == (None, "rows without elements")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("model.embed_tokens.weight", "*embed*"),
        ("lm_head.weight", "lm_head.weight"),
        ("layers.3.weight", "layers.[23].*"),
        ("0", "0"),
    ],
)
def test_policy_name_that_matches_stays_float32(name, pattern):
    decision = Policy(fp32_params=["nothing", pattern]).decide(name, (64, 256))
    assert decision.grid is None
    assert decision.reason == f"matches fp32_params pattern {pattern!r}"


WRAPPED = {
    "PEFT": "base_model.model.model.embed_tokens.weight",
    "DDP": "module.model.embed_tokens.weight",
    "torch.compile": "model._orig_mod.embed_tokens.weight",
    "FSDP1": "_fsdp_wrapped_module.model._fsdp_wrapped_module.embed_tokens.weight",
    "checkpointing": "model._checkpoint_wrapped_module.embed_tokens.weight",
}


@pytest.mark.parametrize("name", WRAPPED.values(), ids=WRAPPED)
def test_policy_pattern_matches_with_and_without_what_wrappers_add(name):
    plain = "model.embed_tokens.weight"
    assert Policy(fp32_params=[plain]).decide(name, (64, 128)).grid is None
    assert Policy(fp32_params=[name]).decide(plain, (64, 128)).grid is None
    assert Policy(fp32_params=[name]).decide(name, (64, 128)).grid is None
    assert Policy(fp32_params=[plain]).decide("model.embed_positions.weight", (64, 128)).grid


def test_policy_pattern_that_matches_none_has_its_nearest_names():
    names = ["model.embed_tokens.weight", "model.layers.0.q_proj.weight", "lm_head.weight"]
    policy = Policy(fp32_params=["*embed_token.*", "lmhead*", "zzz"])
    assert policy.patterns_without(names) == ["*embed_token.*", "lmhead*", "zzz"]
    assert policy.nearest("*embed_token.*", names) == ["model.embed_tokens.weight"]
    assert policy.nearest("lmhead*", names)[0] == "lm_head.weight"
    assert policy.nearest("zzz", names) == []


def test_policy_float32_shares_are_of_all_elements_by_reason():
    shapes = {
        "model.embed.weight": (50, 64),  # 3200 of 20,000
        "a.weight": (128, 100),  # 8-bit
        "a.bias": (128,),
        "lora_B": (425, 8),  # in a StableEmbedding
        "mask": (8, 59),
        "empty": (0, 64),
    }
    assert sum(rows * (columns or [1])[0] for rows, *columns in shapes.values()) == 20_000
    reasons = {"lora_B": "in a StableEmbedding"}
    params = [(name, shape, reasons.get(name, "")) for name, shape in shapes.items()]
    shares = Policy(min_8bit_size=1000, fp32_params=["*embed*"]).float32_shares(params)
    assert list(shares) == [
        "in a StableEmbedding",
        "matches fp32_params pattern '*embed*'",
        "fewer elements than min_8bit_size",
        "1-dimensional",
    ]
    assert list(shares.values()) == [0.17, 0.16, 472 / 20_000, 128 / 20_000]
    assert Policy().float32_shares([(None, (64, 64), ""), (None, (4096, 8), "")]) == {}
    assert Policy().float32_shares([]) == {}
