# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch import nn

from zero8 import Adam8bitBlockwise
from zero8.spec.adam import ADAM
from zero8.spec.segment import Rounding
from zero8.state import keywords
from zero8.state.tell import tell_once


def make(**keywords) -> Adam8bitBlockwise:
    return Adam8bitBlockwise([nn.Parameter(torch.zeros(64, 64))], **keywords)


# What DeepSpeed's JSON can carry for Adam and AdamW, and torch's AdamW keywords.
UNDERSTOOD = {
    "DeepSpeed Adam": {
        "lr": 1e-3,
        "betas": [0.8, 0.99],
        "eps": 1e-6,
        "weight_decay": 0.01,
        "bias_correction": False,
        "amsgrad": False,
        "adam_w_mode": True,
        "torch_adam": False,
        "fp32_optimizer_states": True,
        "set_grad_none": True,
    },
    "adamw_mode": {"adamw_mode": False},
    "torch_adam": {"torch_adam": True},
    "whole numbers": {"lr": 1, "betas": [0, 0], "eps": 0, "weight_decay": 0},
    "torch AdamW": {
        "lr": torch.tensor(1e-3),
        "betas": (0.9, 0.95),
        "amsgrad": False,
        "maximize": True,
        "foreach": True,
        "fused": None,
        "capturable": False,
        "differentiable": False,
    },
    "own": {
        "block_size": 64,
        "codec": "dynamic",
        "min_8bit_size": 0,
        "fp32_params": [],
        "stochastic_rounding": "hash",
        "seed": -3,
    },
}


@pytest.mark.parametrize("keywords", UNDERSTOOD.values(), ids=UNDERSTOOD)
def test_settings_keys_of_other_adams_are_understood(keywords):
    group = make(**keywords).param_groups[0]
    for key in ("lr", "betas", "eps", "weight_decay", "maximize"):
        if key in keywords:
            assert group[key] == keywords[key]


@pytest.mark.parametrize("first", [True, False])
def test_settings_adamw_mode_is_adam_w_mode(first):
    decoupled = make(adam_w_mode=first).param_groups[0]["decoupled_weight_decay"]
    assert decoupled is make(adamw_mode=first).param_groups[0]["decoupled_weight_decay"] is first


REFUSED = {
    "amsgrad": ({"amsgrad": True}, "amsgrad: got True, .* supports False only: .*third moment"),
    "capturable": ({"capturable": True}, "capturable: got True.*CUDA graphs"),
    "differentiable": ({"differentiable": True}, "differentiable: got True"),
    "negative lr": ({"lr": -1.0}, "lr: got -1.0, expected at least 0"),
    "lr as text": ({"lr": "1e-3"}, "lr: got '1e-3', expected a finite number, without quotes"),
    "NaN lr": ({"lr": math.nan}, "lr: got nan, expected a finite number"),
    "lr of two": ({"lr": torch.ones(2)}, r"lr: got a tensor of shape \(2,\), expected one element"),
    "boolean lr": ({"lr": True}, "lr: got True"),
    "betas as number": ({"betas": 0.9}, "betas: got 0.9, expected two numbers"),
    "beta of 1": ({"betas": (0.9, 1.0)}, "betas: got 1.0, expected numbers below 1"),
    "negative beta": ({"betas": (-0.1, 0.9)}, "betas: got -0.1, expected at least 0"),
    "infinite eps": ({"eps": math.inf}, "eps: got inf, expected a finite number"),
    "subnormal eps": ({"eps": 1e-39}, "eps: got 1e-39, expected 0 or at least 1.17.*2.-126"),
    "decay as text": ({"weight_decay": "0"}, "weight_decay: got '0', expected a finite number"),
    "adam_w_mode": ({"adam_w_mode": 1}, "adam_w_mode: got 1, expected true or false"),
    "adamw_mode": ({"adamw_mode": "yes"}, "adamw_mode: got 'yes', expected true or false"),
    "maximize": ({"maximize": 1}, "maximize: got 1, expected true or false"),
    "block_size": ({"block_size": 255}, "block_size: got 255, expected a power of two"),
    "codec": (
        {"codec": "fp4"},
        "codec: got 'fp4', expected one of .*'dynamic', 'fp8', 'linear4'",
    ),
    "min_8bit_size": ({"min_8bit_size": -1}, "min_8bit_size: got -1, expected an integer >= 0"),
    "fractional min_8bit_size": ({"min_8bit_size": 4096.0}, "min_8bit_size: got 4096.0"),
    "number as pattern": ({"fp32_params": ["a", 3]}, "fp32_params: got 3 in the list"),
    "fp32_params": ({"fp32_params": "*embed*"}, "fp32_params: got .*expected a list"),
    "patterns without names": ({"fp32_params": ["*"]}, "pass model.named_parameters"),
    "rounding": ({"stochastic_rounding": "up"}, "stochastic_rounding: got 'up', expected one of"),
    "seed": ({"seed": 1.5}, "seed: got 1.5, expected an integer"),
}


@pytest.mark.parametrize(("keywords", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_bad_value_raises_with_what_was_expected(keywords, message):
    with pytest.raises(ValueError, match=message):
        make(**keywords)


def test_settings_unknown_key_raises_with_the_valid_ones():
    with pytest.raises(ValueError, match="unknown parameter 'learning_rate'") as error:
        make(learning_rate=1e-3)
    for key in (*ADAM.keywords, *keywords.OWN_KEYS, *keywords.NO_EFFECT_KEYS):
        assert key in str(error.value)


# What users of other libraries write, and the hint that they get.
OTHER_NAMES = {
    "wd": "Did you mean 'weight_decay'",
    "learning_rate": "Did you mean 'lr'",
    "blocksize": "Did you mean 'block_size'",
    "beta2": "Did you mean 'betas', as in",
    "optim_bits": "Leave it out: moments are 8-bit",
    "percentile_clipping": "Leave it out, and clip by torch.nn.utils.clip_grad_norm_",
    "is_paged": "Leave it out: DeepSpeed's offload_optimizer or FSDP2's CPUOffloadPolicy",
    "bf16_stochastic_round": "Did you mean 'stochastic_rounding'",
    "qqq": "Valid ones are",
}


@pytest.mark.parametrize(("key", "hint"), OTHER_NAMES.items(), ids=OTHER_NAMES)
def test_settings_name_of_another_library_raises_with_a_hint(key, hint):
    with pytest.raises(ValueError) as error:
        make(**{key: 1})
    assert str(error.value).startswith(f"unknown parameter {key!r} for Adam8bitBlockwise.  {hint}")


@pytest.mark.parametrize("key", ["lr", "betas", "amsgrad", "maximize"])
def test_settings_bad_value_in_a_group_raises(key):
    optimizer = make()
    with pytest.raises(ValueError, match=f"{key}: got "):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], key: "x"})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("value", "rounding"),
    [
        ("auto", Rounding.DITHER),
        (True, Rounding.DITHER),
        ("dither", Rounding.DITHER),
        ("hash", Rounding.HASH),
        (False, Rounding.NEAREST),
    ],
)
def test_settings_stochastic_rounding_values_are_known(value, rounding):
    assert make(stochastic_rounding=value).settings.rounding == rounding


def lines_of_no_decay(caplog) -> list[str]:
    return [line for line in caplog.messages if "weight_decay is not given" in line]


def made(case):
    """Make an optimizer that says something of the decay, or nothing."""
    first, second = ([nn.Parameter(torch.zeros(2))] for _ in range(2))
    decayed = {"params": first, "weight_decay": 0.0}
    groups = {"in every group": [decayed], "in one group": [decayed, {"params": second}]}
    keywords = {
        "zero": {"weight_decay": 0},
        "adam": {"adam_w_mode": False},
        "adamw_mode": {"adamw_mode": False},
    }
    return Adam8bitBlockwise(groups.get(case, first), **keywords.get(case, {}))


# Whoever says 0, decays each group, or has asked for Adam with L2 knows what there is.
SAID = {"not": 1, "in one group": 1, "in every group": 0, "zero": 0, "adam": 0, "adamw_mode": 0}


@pytest.mark.parametrize(("case", "count"), SAID.items(), ids=SAID)
def test_weight_decay_that_is_not_given_is_logged_once(case, count, caplog):
    tell_once.cache_clear()
    for _ in range(2):
        assert made(case).param_groups[-1]["weight_decay"] == 0.0
    lines = lines_of_no_decay(caplog)
    assert len(lines) == count and all("torch's AdamW has 0.01" in line for line in lines)


@pytest.mark.parametrize("key", keywords.WHOLE_OPTIMIZER_KEYS)
def test_group_with_a_setting_of_the_whole_optimizer_is_refused(key):
    with pytest.raises(ValueError, match=f"{key}: got it in a parameter group"):
        Adam8bitBlockwise([{"params": [nn.Parameter(torch.zeros(2))], key: 64}])


@pytest.mark.parametrize("add", [True, False])
def test_group_without_params_raises_with_what_is_expected(add):
    optimizer = make()
    with pytest.raises(ValueError, match=r"group with \['lr'\], without 'params'; expected {"):
        optimizer.add_param_group({"lr": 1}) if add else Adam8bitBlockwise([{"lr": 1}])
    assert len(optimizer.param_groups) == 1


def test_group_refused_for_lack_of_names_is_not_added():
    optimizer = Adam8bitBlockwise([("w", nn.Parameter(torch.zeros(2)))], fp32_params=["w"])
    with pytest.raises(ValueError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1
