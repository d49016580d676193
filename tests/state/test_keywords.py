# SPDX-License-Identifier: Apache-2.0
"""The keywords of all optimizers: those of other libraries, bad values, and groups."""

import inspect
import math

import pytest
import torch
from small_optimizers import param, required_by
from torch import nn

import zero8
from zero8 import Adam8bitBlockwise, AdEMAMix8bitBlockwise, Lion8bitBlockwise, SGD8bitBlockwise
from zero8.optimizer.elementwise import OPTIMIZERS
from zero8.spec.algorithms import ALGORITHMS
from zero8.spec.segment import Rounding
from zero8.state import keywords
from zero8.state.tell import tell_once

ADAM, LION, SGD, MIX = Adam8bitBlockwise, Lion8bitBlockwise, SGD8bitBlockwise, AdEMAMix8bitBlockwise


def make(made=ADAM, **keywords):
    return made([nn.Parameter(torch.zeros(64, 64))], **keywords)


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
        "seed": -3,
    },
}


@pytest.mark.parametrize("keywords", UNDERSTOOD.values(), ids=UNDERSTOOD)
def test_settings_keys_of_other_adams_are_understood(keywords):
    group = make(**keywords).param_groups[0]
    for key in ("lr", "betas", "eps", "weight_decay", "maximize"):
        if key in keywords:
            assert group[key] == keywords[key]


REFUSED = {
    "amsgrad": (ADAM, {"amsgrad": True}, "got True, .* supports False only: .*third moment"),
    "capturable": (ADAM, {"capturable": True}, "got True.*CUDA graphs"),
    "differentiable": (ADAM, {"differentiable": True}, "got True"),
    "negative lr": (ADAM, {"lr": -1.0}, "got -1.0, expected at least 0"),
    "lr as text": (ADAM, {"lr": "1e-3"}, "got '1e-3', expected a finite number, without quotes"),
    "NaN lr": (ADAM, {"lr": math.nan}, "got nan, expected a finite number"),
    "lr of two": (ADAM, {"lr": torch.ones(2)}, r"a tensor of shape \(2,\), expected one element"),
    "boolean lr": (ADAM, {"lr": True}, "got True"),
    "betas as number": (ADAM, {"betas": 0.9}, "got 0.9, expected two numbers"),
    "beta of 1": (ADAM, {"betas": (0.9, 1.0)}, "got 1.0, expected numbers below 1"),
    "negative beta": (ADAM, {"betas": (-0.1, 0.9)}, "got -0.1, expected at least 0"),
    "infinite eps": (ADAM, {"eps": math.inf}, "got inf, expected a finite number"),
    "subnormal eps": (ADAM, {"eps": 1e-39}, "got 1e-39, expected 0 or at least 1.17.*2.-126"),
    "decay as text": (ADAM, {"weight_decay": "0"}, "got '0', expected a finite number"),
    "adam_w_mode": (ADAM, {"adam_w_mode": 1}, "got 1, expected true or false"),
    "adamw_mode": (ADAM, {"adamw_mode": "yes"}, "got 'yes', expected true or false"),
    "maximize": (ADAM, {"maximize": 1}, "got 1, expected true or false"),
    "block_size": (ADAM, {"block_size": 255}, "got 255, expected a power of two"),
    "codec": (ADAM, {"codec": "fp4"}, "got 'fp4', expected one of .*'dynamic', 'fp8', 'linear4'"),
    "min_8bit_size": (ADAM, {"min_8bit_size": -1}, "got -1, expected an integer >= 0"),
    "fractional size": (ADAM, {"min_8bit_size": 4096.0}, "got 4096.0"),
    "number as pattern": (ADAM, {"fp32_params": ["a", 3]}, "got 3 in the list"),
    "fp32_params": (ADAM, {"fp32_params": "*embed*"}, "got .*expected a list"),
    "patterns without names": (ADAM, {"fp32_params": ["*"]}, "pass model.named_parameters"),
    "rounding": (ADAM, {"stochastic_rounding": "up"}, "got 'up', expected one of"),
    "rounding of 1": (ADAM, {"stochastic_rounding": 1}, "got 1, expected one of"),
    "correction": (ADAM, {"weight_correction_bits": 4}, "got 4, expected one of"),
    "seed": (ADAM, {"seed": 1.5}, "got 1.5, expected an integer"),
    "form": (ADAM, {"state_dict_format": "fp16"}, "got 'fp16', expected one of"),
    "no momentum": (SGD, {"momentum": 0.0}, r"got 0\.0, expected .* use torch.optim.SGD"),
    "momentum 1": (SGD, {"momentum": 1.0}, r"got 1\.0, expected a number above 0 and"),
    "dampening": (SGD, {"dampening": 1.5}, r"got 1\.5, expected at most 1"),
    "nesterov": (SGD, {"nesterov": True, "dampening": 0.5}, "got true with a dampening"),
    "flag": (SGD, {"nesterov": 1}, "got 1, expected true or false"),
    "two betas": (MIX, {"betas": (0.9, 0.999)}, "got .*, expected three numbers, such as"),
    "alpha": (MIX, {"alpha": -1.0}, r"got -1\.0, expected at least 0"),
    "schedule": (MIX, {"t_beta3": 5, "betas": (0.0, 0.9, 0.99)}, "got 5 .*beta1 above 0"),
}


@pytest.mark.parametrize(("made", "keywords", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_bad_value_raises_with_what_was_expected(made, keywords, message):
    with pytest.raises(ValueError, match=f"^{next(iter(keywords))}: .*{message}"):
        make(made, **required_by(made) | keywords)


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
def test_settings_name_of_another_library_raises_with_a_hint_and_the_valid_ones(key, hint):
    with pytest.raises(ValueError) as error:
        make(**{key: 1})
    assert str(error.value).startswith(f"unknown parameter {key!r} for Adam8bitBlockwise.  {hint}")
    for valid in (*ADAM.algorithm.keywords, *keywords.OWN_KEYS, *keywords.NO_EFFECT_KEYS):
        assert valid in str(error.value)


@pytest.mark.parametrize("made", OPTIMIZERS)
def test_keyword_that_is_not_its_own_is_refused_with_those_that_are(made):
    for key in {"eps", "bias_correction", "adam_w_mode", "beta1"} - set(made.algorithm.keywords):
        with pytest.raises(ValueError, match=f"'{key}' for {made.__name__}") as raised:
            make(made, **required_by(made), **{key: True})
        for known in ("betas", "alpha", "dampening"):
            assert (known in str(raised.value)) == (known in made.algorithm.keywords)


@pytest.mark.parametrize("value", keywords.ROUNDINGS)
def test_settings_stochastic_rounding_values_are_known(value):
    rounding = {"hash": Rounding.HASH, False: Rounding.NEAREST}.get(value, Rounding.DITHER)
    assert make(stochastic_rounding=value).settings.rounding == rounding


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
        group = made(case).param_groups[-1]
        assert group["weight_decay"] == 0.0
        assert group["decoupled_weight_decay"] is (not case.startswith("adam"))
    lines = [line for line in caplog.messages if "weight_decay is not given" in line]
    assert len(lines) == count and all("torch's AdamW has 0.01" in line for line in lines)


GROUPS = {
    **{key: ({key: 64}, f"{key}: got it in a") for key in keywords.WHOLE_OPTIMIZER_KEYS},
    **{key: ({key: "x"}, f"{key}: got ") for key in ("lr", "betas", "amsgrad", "maximize")},
    "without params": ({"lr": 1, "params": None}, r"with \['lr'\], without 'params'; expected {"),
    "without names": ({}, "with/without names"),
}


@pytest.mark.parametrize(("settings", "message"), GROUPS.values(), ids=GROUPS)
def test_group_that_is_refused_is_not_added(settings, message):
    optimizer = Adam8bitBlockwise([("w", param(2))], fp32_params=["w"])
    named = [param(3)] if not settings else [("b", param(3))]
    group = {"params": named, **settings}
    if group["params"] is None:
        del group["params"]
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_every_algorithm_has_an_optimizer_that_torch_knows_and_the_defaults_of_adam():
    assert [one.algorithm for one in OPTIMIZERS] == list(ALGORITHMS)
    for one in OPTIMIZERS:
        assert one.__name__ == one.algorithm.class_name
        assert getattr(torch.optim, one.__name__) is getattr(zero8, one.__name__) is one
    parameters = inspect.signature(Adam8bitBlockwise.__init__).parameters
    assert {key: parameters[key].default for key in keywords.DEFAULTS} == keywords.DEFAULTS
