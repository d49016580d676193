# SPDX-License-Identifier: Apache-2.0
"""Which parameters Muon takes, and what it refuses."""

import copy
import pickle

import pytest
import torch
from nests import assert_same
from small_optimizers import assert_equal, param, run
from torch import nn

from zero8 import Muon8bitBlockwise, StableEmbedding
from zero8.spec.adam import ADAM
from zero8.spec.muon import MUON

pytestmark = pytest.mark.usefixtures("one_torch_thread")


# --- Which parameters it takes -------------------------------------------------------------------


def groups_of(optimizer) -> dict[bool, list[str]]:
    """Return the names in the groups of Muon and of AdamW."""
    return {group["use_muon"]: group["param_names"] for group in optimizer.param_groups}


def model() -> nn.Module:
    made = nn.Module()
    made.embed_tokens = nn.Embedding(20, 64)
    made.stable = StableEmbedding(20, 64)
    made.inner = nn.Linear(64, 64)
    made.conv = nn.Conv2d(4, 8, 3)
    made.lm_head = nn.Linear(64, 20)
    return made


def marked() -> nn.Module:
    """Return a model of which the attribute `use_muon` decides."""
    made = model()
    for name, p in made.named_parameters():
        p.use_muon = name == "lm_head.weight"
    return made


TAKEN = {
    "names": (model, {}, {"inner.weight", "conv.weight"}),
    "patterns": (
        model,
        {"adam_params": ["inner*", "co*"]},
        {"embed_tokens.weight", "lm_head.weight"},
    ),
    "no patterns": (
        model,
        {"adam_params": []},
        {"inner.weight", "lm_head.weight", "embed_tokens.weight", "conv.weight"},
    ),
    "attributes": (marked, {}, {"lm_head.weight"}),
}


@pytest.mark.parametrize(("make", "keywords", "expected"), TAKEN.values(), ids=TAKEN)
def test_muon_takes_matrices_by_name_pattern_and_attribute(make, keywords, expected):
    made = make()
    groups = groups_of(Muon8bitBlockwise(made.named_parameters(), **keywords))
    assert set(groups[True]) == expected
    assert set(groups[False]) == {name for name, _ in made.named_parameters()} - expected


def test_muon_splits_each_group_and_keeps_its_settings():
    params = [("a", param(8, 64)), ("a.bias", param(64)), ("b", param(9, 64)), ("b.bias", param(7))]
    groups = [{"params": params[:2], "lr": 0.5}, {"params": params[2:], "weight_decay": 0.3}]
    optimizer = Muon8bitBlockwise(groups)
    found = [
        (g["use_muon"], g["param_names"], g["lr"], g["weight_decay"])
        for g in optimizer.param_groups
    ]
    assert found == [
        (True, ["a"], 0.5, 0.1),
        (False, ["a.bias"], 0.5, 0.1),
        (True, ["b"], 1e-3, 0.3),
        (False, ["b.bias"], 1e-3, 0.3),
    ]


def test_muon_learning_rates_of_both_are_deepspeeds_muon_lr_and_adam_lr():
    """A group's own lr comes first, as there."""
    weights = {"inner": param(8, 64), "bias": param(64)}
    own = {"params": [("late", param(8, 64)), ("last", param(64))], "lr": 0.5}
    optimizer = Muon8bitBlockwise(weights.items(), lr=0.1, muon_lr=0.2, adam_lr=torch.tensor(0.3))
    copied = pickle.loads(pickle.dumps(optimizer))
    optimizer.add_param_group(own)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx(
        [0.2, 0.3, 0.5, 0.5]
    )
    copied.add_param_group({"params": [("next", param(8, 64))]})
    assert copied.param_groups[-1]["lr"] == 0.2
    (matrices, others) = Muon8bitBlockwise(weights.items(), lr=0.1, adam_lr=0.3).param_groups
    assert (matrices["lr"], others["lr"]) == (0.1, 0.3)


def switched(optimizer):
    optimizer.param_groups[0]["use_muon"] = False


def moved(optimizer):
    old, new = optimizer.param_groups
    new["params"].append(old["params"].pop(0))
    new["param_names"].append(old["param_names"].pop(0))


@pytest.mark.parametrize("change", [switched, moved])
def test_muon_parameter_that_changes_sides_raises_until_its_state_is_dropped(change):
    p, q = param(8, 64), param(8, 64)
    optimizer = Muon8bitBlockwise([("p", p), ("inner", param(8, 64)), ("embed", q)])
    params = [p, q]
    run(optimizer, params, 1)
    before = copy.deepcopy(params)
    change(optimizer)
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ValueError, match=r"parameter p: .*del optimizer\.state\[p\]"):
            use()
    assert_equal(params, before)
    del optimizer.state[p]
    run(optimizer, params, 1, start=1)
    assert optimizer.state[p]["step"] == 1 and "exp_avg" in str(list(optimizer.state[p]))
    assert optimizer.state[q]["step"] == 2
    optimizer.state_dict()


def test_muon_state_dict_whose_use_muon_was_switched_raises_and_changes_nothing():
    p = param(8, 64)
    optimizer = Muon8bitBlockwise([("p", p), ("bias", param(64))])
    run(optimizer, [p], 1)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][0]["use_muon"] = False
    with pytest.raises(ValueError, match=r"del optimizer\.state\[p\]"):
        optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict(), before)


def test_muon_refused_group_leaves_no_part():
    """AdamW's part is refused, after Muon's was added."""
    optimizer = Muon8bitBlockwise([("first", param(8, 64))])
    group = {"params": [("inner", param(8, 64)), ("bias", param(64))], "betas": (2.0, 0.9)}
    with pytest.raises(ValueError, match="betas"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


# --- Values that it refuses ----------------------------------------------------------------------


def test_muon_knows_the_algorithm_of_a_parameter_that_zero3_takes_out_of_its_group():
    """During a step DeepSpeed leaves one partition in a group, and may load another's state."""
    params = [nn.Parameter(torch.ones(64, 64)) for _ in range(3)]
    groups = [{"params": params[2 * one :][:2], "use_muon": not one} for one in range(2)]
    optimizer = Muon8bitBlockwise(groups, lr=1e-3)
    expected = [optimizer.kind_of(p, {}).algorithm for p in params]
    optimizer.param_groups[0]["params"] = params[:1]
    optimizer.param_groups[1]["params"] = []
    assert [optimizer.kind_of(p, {}).algorithm for p in params] == expected == [MUON, MUON, ADAM]
