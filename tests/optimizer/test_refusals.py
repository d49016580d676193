# SPDX-License-Identifier: Apache-2.0
"""What optimizers refuse, by option, name, group, parameter and gradient: nothing changes then.

Messages have the name, what was got, and what is expected or to be done.
"""

import copy
import inspect
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from int8_weights import int8_param
from nests import assert_same
from small_optimizers import param, required_by, run, set_grads
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import zero8
from zero8 import Adam8bitBlockwise, AdEMAMix8bitBlockwise, Muon8bitBlockwise, SGD8bitBlockwise
from zero8.optimizer import check
from zero8.optimizer.elementwise import OPTIMIZERS
from zero8.spec.algorithms import ALGORITHMS
from zero8.state import keywords
from zero8.state.tell import tell_once

ADAM, SGD = Adam8bitBlockwise, SGD8bitBlockwise
MIX, MUON = AdEMAMix8bitBlockwise, Muon8bitBlockwise
BF16, NAN = torch.bfloat16, math.nan

# --- Options -------------------------------------------------------------------------------------

BAD = {
    ADAM: {
        **{name: [True] for name in ("amsgrad", "capturable", "differentiable")},
        "lr": [-1.0, "1e-3", NAN, torch.ones(2), True],
        "betas": [0.9, (0.9,), (0.9, 1.0), (-0.1, 0.9), "ab"],
        "eps": [math.inf, 1e-39, -1e-8, "small"],
        "weight_decay": ["0", -0.1, NAN],
        **{name: [1, "yes"] for name in ("adam_w_mode", "adamw_mode", "maximize")},
        "block_size": [255, 8192, 256.0],
        "codec": ["fp4"],
        "min_8bit_size": [-1, 4096.0],
        "fp32_params": [["a", 3], "*embed*"],
        "stochastic_rounding": ["up", 1],
        "weight_correction_bits": [4],
        "seed": [1.5],
        "state_dict_format": ["fp16"],
    },
    SGD: {"momentum": [0.0, 1.0], "dampening": [1.5], "nesterov": [1]},
    MIX: {"betas": [(0.9, 0.999)], "alpha": [-1.0]},
    MUON: {
        "lr": [-1.0, NAN, "fast"],
        "muon_lr": [-1.0, "fast"],
        "adam_lr": [-1.0, "fast"],
        "momentum": [0.0, 1.0, -0.5, NAN, "0.9", None],
        "nesterov": ["yes", 2],
        "ns_coefficients": [(1.0, 2.0), 3.0, "abc", ("a", "b", "c"), (1.0, NAN, 2.0), None],
        "ns_steps": [0, -1, 100, 2.5, True, "5"],
        "ns_eps": [-1e-7, NAN, "small"],
        "ns_dtype": ["float16", torch.float32, None],
        "adjust_lr_fn": ["matched", 3, "Original"],
        "betas": [(1.0, 0.9), (0.9,), 0.9],
        "adam_params": ["embed", [3], [None]],
    },
}
ROWS = [
    (made, name, value)
    for made, options in BAD.items()
    for name, values in options.items()
    for value in values
]


@pytest.mark.parametrize(("made", "name", "value"), ROWS, ids=str)
def test_option_with_a_bad_value_is_refused_with_what_was_got_and_expected(made, name, value):
    params = [("inner", param(8, 64)), ("bias", param(64))]
    with pytest.raises(ValueError) as raised:
        made(params, **required_by(made) | {name: value})
    text = str(raised.value)
    assert text.startswith(f"{name}: ") and "got " in text
    assert "expected" in text or "supports" in text or "use" in text


TOGETHER = {
    "nesterov: got true with a dampening": (SGD, {"nesterov": True, "dampening": 0.5}),
    "t_beta3: got 5 .*beta1 above 0": (MIX, {"t_beta3": 5, "betas": (0.0, 0.9, 0.99)}),
    "fp32_params: .*pass model.named_parameters": (ADAM, {"fp32_params": ["*"]}),
}


@pytest.mark.parametrize("message", TOGETHER)
def test_options_that_exclude_each_other_are_refused(message):
    made, options = TOGETHER[message]
    with pytest.raises(ValueError, match=message):
        made([param(64, 64)], **required_by(made) | options)


# What DeepSpeed's JSON can carry for Adam and AdamW, torch's AdamW keywords, and our own.
UNDERSTOOD = [
    {"lr": 1e-3, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.01, "amsgrad": False}
    | {"bias_correction": False, "adam_w_mode": True, "torch_adam": True, "set_grad_none": True}
    | {"fp32_optimizer_states": True},
    {"lr": 1, "betas": [0, 0], "eps": 0, "weight_decay": 0},
    {"lr": torch.tensor(1e-3), "betas": (0.9, 0.95), "amsgrad": False, "maximize": True}
    | {"foreach": True, "fused": None, "capturable": False, "differentiable": False},
    {"block_size": 64, "codec": "dynamic", "min_8bit_size": 0, "fp32_params": [], "seed": -3},
]


@pytest.mark.parametrize("given", UNDERSTOOD)
def test_options_of_other_adams_are_understood(given):
    (group,) = ADAM([param(64, 64)], **given).param_groups
    kept = ("lr", "betas", "eps", "weight_decay", "maximize")
    assert all(group[key] == given[key] for key in kept if key in given)


# What users of other libraries write, and the hint that they get.
OTHER_NAMES = {
    "wd": "Did you mean 'weight_decay'",
    "learning_rate": "Did you mean 'lr'",
    "beta2": "Did you mean 'betas', as in",
    "optim_bits": "Leave it out: moments are 8-bit",
    "percentile_clipping": "Leave it out, and clip by torch.nn.utils.clip_grad_norm_",
    "qqq": "Valid ones are",
}


@pytest.mark.parametrize(("key", "hint"), OTHER_NAMES.items(), ids=OTHER_NAMES)
def test_option_of_another_library_is_refused_with_a_hint_and_the_valid_ones(key, hint):
    with pytest.raises(ValueError) as error:
        ADAM([param(64, 64)], **{key: 1})
    assert str(error.value).startswith(f"unknown parameter {key!r} for Adam8bitBlockwise.  {hint}")
    for valid in (*ADAM.algorithm.keywords, *keywords.OWN_KEYS, *keywords.NO_EFFECT_KEYS):
        assert valid in str(error.value)


def test_every_algorithm_has_an_optimizer_that_torch_knows_and_the_defaults_of_adam():
    assert [one.algorithm for one in OPTIMIZERS] == list(ALGORITHMS)
    for one in OPTIMIZERS:
        assert one.__name__ == one.algorithm.class_name
        assert getattr(torch.optim, one.__name__) is getattr(zero8, one.__name__) is one
    parameters = inspect.signature(ADAM.__init__).parameters
    assert {key: parameters[key].default for key in keywords.DEFAULTS} == keywords.DEFAULTS


def test_weight_decay_that_is_not_given_is_logged_once(caplog):
    """Whoever says 0, or has asked for Adam with L2, knows what there is."""
    tell_once.cache_clear()
    for given, count in (({"weight_decay": 0}, 0), ({"adam_w_mode": False}, 0), ({}, 1), ({}, 1)):
        ADAM([param(2)], **given)
        said = [line for line in caplog.messages if "weight_decay is not given" in line]
        assert len(said) == count


# --- Groups --------------------------------------------------------------------------------------

NEW = [("new", param(64, 128))]
GROUPS = {
    **{
        key: ({"params": NEW, key: 64}, f"{key}: got it in a")
        for key in keywords.WHOLE_OPTIMIZER_KEYS
    },
    **{key: ({"params": NEW, key: "x"}, f"{key}: got ") for key in ("lr", "betas", "maximize")},
    "no params": ({"lr": 1}, r"with \['lr'\], without 'params'; expected {"),
    "no names": ({"params": [param(64, 128)]}, "with/without names"),
    "a list": (NEW, "must be a dict"),
}


@pytest.mark.parametrize(("group", "message"), GROUPS.values(), ids=GROUPS)
def test_group_that_is_refused_leaves_the_optimizer_as_it_was(group, message):
    params = [("first", param(64, 128)), ("bias", param(50))]
    optimizer = ADAM(params)
    run(optimizer, [p for _, p in params], 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.add_param_group(group)
    with pytest.raises(ValueError, match="appear in more than one|again"):
        optimizer.add_param_group({"params": params[:1]})
    assert_same(optimizer.state_dict(), before)


# --- Parameters that can never be stepped ---------------------------------------------------------


def with_attribute(name: str) -> nn.Parameter:
    p = param(64)
    setattr(p, name, True)
    return p


def int8(dtype=torch.float32, columns=64):
    p = int8_param(param(64, 64).detach())
    p = nn.Parameter(type(p.detach())(p.int_data, p.scale.to(dtype)))
    p.int_data = p.int_data[:, :columns]
    return p


NEVER = {
    "float16.*autocast": lambda: nn.Parameter(torch.ones(64, 64).half()),
    "float64.*model.float": lambda: nn.Parameter(torch.ones(64, 64).double()),
    "complex64.*view_as_real": lambda: nn.Parameter(torch.ones(64, 64) * 1j),
    "layout torch.sparse_coo": lambda: nn.Parameter(torch.eye(64).to_sparse()),
    "on the meta device": lambda: nn.Parameter(torch.ones(64, 64, device="meta")),
    "scales of dtype torch.float16, expected": lambda: int8(torch.float16),
    "has 32 columns; expected whole rows": lambda: int8(columns=32),
    "class 'TwoTensor', which has no storage": lambda: nn.Parameter(
        TwoTensor(torch.ones(64, 64), torch.ones(64, 64))
    ),
}


@pytest.mark.parametrize("message", NEVER)
def test_parameter_that_can_never_be_stepped_is_refused_when_it_is_given(message, monkeypatch):
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    good, bad, optimizer = param(64, 100), NEVER[message](), ADAM([("a", param(64, 100))])
    with pytest.raises(ValueError, match=f"parameter b: got .*{message}"):
        ADAM([("a", good), ("b", bad)])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [("b", bad)]})
    assert len(optimizer.param_groups) == 1
    ADAM([("a", good), ("b", bad.requires_grad_(False))])  # frozen: never stepped


def test_float16_is_taken_where_deepspeed_may_put_float32_masters_in_its_place(monkeypatch):
    monkeypatch.setattr(check, "sys", SimpleNamespace(modules={"deepspeed": None}))
    ADAM([param(64, 64, dtype=torch.float16)])


def test_int8_weights_are_refused_with_what_they_cannot_have(monkeypatch):
    with pytest.raises(ValueError, match="INT8 weights and weight_correction_bits=8"):
        ADAM([int8()], weight_correction_bits=8)
    with pytest.raises(ValueError, match="expected floating-point weights for the matrices of Muo"):
        MUON([("layer0.weight", int8())], lr=1e-3)
    MUON([{"params": [("layer0.weight", int8())], "use_muon": False}], lr=1e-3)
    monkeypatch.setattr("zero8.optimizer.blockwise.constructing_engine", lambda: (object(), {}))
    with pytest.raises(ValueError, match="under DeepSpeed, which copies parameters"):
        ADAM([int8()])


NOT_OF_MUON = {
    r"pass model\.named_parameters\(\)": lambda: [param(64, 64)],
    "FSDP1 has flattened": lambda: [with_attribute("_fsdp_flattened")],
    "use_muon: .*expected 2 dimensions": lambda: [with_attribute("use_muon")],
    "use_muon: .*parameter .*expected 2": lambda: [{"params": [param(64)], "use_muon": True}],
}


@pytest.mark.parametrize("message", NOT_OF_MUON)
def test_parameter_that_muon_cannot_take_is_refused(message):
    with pytest.raises(ValueError, match=message):
        MUON(NOT_OF_MUON[message]())


# --- Parameters and gradients that cannot be stepped now ------------------------------------------


def with_grad(p, grad):
    """Give a parameter a gradient of another kind, which autograd would not do."""
    p.grad_dtype = None
    p.grad = grad
    return p


ONES = torch.ones(64, 64)
# The parameter when the optimizer is made, the settings, and what becomes of it then.
NOW = {
    "sparse gradient; set sparse=False": (
        lambda: param(64, 64), {}, lambda p: with_grad(p, ONES.to_sparse()),
    ),
    "torch.bfloat16 parameter of dtype torch.float16.*keep float32 weights": (
        lambda: param(64, 64, dtype=BF16), {}, lambda p: with_grad(p, ONES.half()),
    ),
    "gradient of type TwoTensor without storage of its": (
        lambda: param(64, 64), {}, lambda p: with_grad(p, TwoTensor(ONES, ONES)),
    ),
    "parameter of dtype torch.complex64": (
        lambda: param(64, 64), {}, lambda p: setattr(p, "data", p.data * 1j),
    ),
    "dtype torch.float16.*float32 weights: use torch.autocast": (
        lambda: param(64, 64), {}, lambda p: setattr(p, "data", p.data.half()),
    ),
    r"gradient of shape \(64, 64\), the parameter has \(128": (
        lambda: param(64, 64), {},
        lambda p: (with_grad(p, ONES), setattr(p, "data", torch.zeros(128, 64))),
    ),
    "scales of dtype torch.float16": (int8, {}, lambda p: setattr(p, "scale", p.scale.half())),
    r"64 rows with scales of shape \(63,\)": (
        int8, {}, lambda p: setattr(p, "scale", p.scale[:63].clone()),
    ),
    "weight_correction_bits=8": (
        lambda: int8(BF16).requires_grad_(False), {"weight_correction_bits": 8},
        lambda p: p.requires_grad_(True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", NOW)
def test_step_with_what_cannot_be_stepped_is_refused_before_any_change(message):
    make, settings, change = NOW[message]
    good, bad = param(64, 100), make()
    optimizer = ADAM([("good", good), ("bad", bad)], **settings)
    change(bad)
    set_grads([good], 1)
    if bad.grad is None:
        with_grad(bad, torch.ones(bad.shape, dtype=bad.dtype))
    before = good.detach().clone()
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(good, before) and not optimizer.state


def test_step_with_a_damaged_state_makes_no_states_of_others():
    first, damaged = param(64, 80), param(64, 80)
    optimizer = ADAM([first, damaged])
    run(optimizer, [damaged], 1)
    optimizer.state[damaged]["format"][0] = 99
    before = first.detach().clone()
    set_grads([first, damaged], 1)
    with pytest.raises(ValueError, match="format version 99"):
        optimizer.step()
    assert list(optimizer.state) == [damaged] and torch.equal(first, before)
