# SPDX-License-Identifier: Apache-2.0
"""State dicts in which something is of no kind that a save writes: ValueError, nothing changed.

tests/checkpoint/test_mutations.py finds such by chance; here is one of each.
"""

import copy

import pytest
import torch
from mutations import digest, laughs, load_and_step, plain_optimizer, saved_state, take_steps

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FLOAT8 = torch.float8_e4m3fn


def entry(key, value):
    def change(saved):
        saved["state"][0][key] = value

    return change


def setting(key, value):
    def change(saved):
        saved["param_groups"][0][key] = value

    return change


def state(key, value):
    def change(saved):
        saved["state"][key] = value

    return change


def of_adam(values):
    """Return what makes the first state one of an fp32 Adam, with these values in both moments."""
    moments = {which: values.expand(3, 300) for which in ("exp_avg", "exp_avg_sq")}
    return state(0, {"step": 3, **moments})


def without(key):
    return lambda saved: saved["state"][0].pop(key)


def changed(key, change):
    def changes(saved):
        saved["state"][0][key] = change(saved["state"][0][key])

    return changes


def with_number(place, number):
    """Return what changes a number of the format."""
    return changed("format", lambda f: f.index_fill(0, torch.tensor([place]), number))


REFUSED = {
    "an unknown algorithm": (with_number(1, 7), "got a state of algorithm 7"),
    "an unknown codec": (with_number(2, 99 * 0x101), "codec number 99 is unknown"),
    "no step": (without("step"), "step"),
    "no history": (without("history"), "history"),
    "no format": (without("format"), "without .*exp_avg"),
    "no codes": (without("exp_avg_sq_q8"), "exp_avg_sq_q8: missing"),
    "no scales": (without("exp_avg_scale"), "exp_avg_scale: missing"),
    "a scale of NaN": (
        changed("exp_avg_scale", lambda s: s * torch.nan),
        "exp_avg of .*: got a scale that is not finite",
    ),
    "v below zero": (
        changed("exp_avg_sq_scale", torch.Tensor.neg),
        "exp_avg_sq of .*: got a negative scale",
    ),
    "a code that there is not": (
        changed("exp_avg_q8", lambda c: torch.full_like(c, 128)),
        "exp_avg of .*: got a code that is NaN or unused: 128",
    ),
    "history of NaN": (entry("history", float("nan")), "history: got nan"),
    "one parameter less": (
        lambda saved: saved["param_groups"][0]["params"].pop(),
        "size|length|parameter",
    ),
    "lr of NaN": (setting("lr", float("nan")), "lr: got nan"),
    "negative eps": (setting("eps", -1.0), "eps: got -1.0"),
    "beta2 above 1": (setting("betas", (0.9, 1.5)), "betas: got 1.5"),
    "betas as a string": (setting("betas", "ab"), "betas: got 'ab'"),
    "infinite weight decay": (setting("weight_decay", float("inf")), "weight_decay: got inf"),
    "a step of laughs": (entry("step", laughs()), "step: got a value of type list"),
    "a step of 5000 digits": (entry("step", 10**5000), "step: got an integer of 16610 bits"),
    "a history of laughs": (entry("history", laughs()), "history: got a value of type list"),
    "a format of 10^5 sizes": (entry("format", torch.ones(10**5).long()), "got 100000 numbers"),
    "a format of laughs": (entry("format", laughs()), "not a row of int64: a value of type list"),
    "an entry whose key is a number": (state(0, {1: 2, "step": 3}), r"got entries \['step', 1\]"),
    "a state of None": (state(0, None), "states that are not dicts"),
    "a state of a number": (state(0, 1.5), "states that are not dicts"),
    "a state of nobody": (state(99, {"exp_avg_q8": 0}), r"states of \[99\]"),
    "a state of a name": (state("x", {"exp_avg": 1}), r"states of \['x'\]"),
    "one of bitsandbytes": (state(0, {"step": 3, "state1": 1}), "zero8 checkpoint convert IN OUT"),
    "moments of float8": (of_adam(torch.ones(1).to(FLOAT8)), "got dtype torch.float8_e4m3fn"),
    "moments of 1e300": (of_adam(torch.tensor([1e300]).double()), "float32 does not hold"),
    "names of numbers": (setting("param_names", [1, 2, 3]), "param_names: got a value"),
    "names of a tensor": (setting("param_names", torch.ones(2)), "param_names: got a value"),
    "lr of laughs": (setting("lr", laughs()), "lr: got a value of type list"),
    "lr of 5000 digits": (setting("lr", 10**5000), "lr: got an integer of 16610 bits"),
    "lr on meta": (setting("lr", torch.ones((), device="meta")), "lr: got a tensor"),
    "betas of laughs": (setting("betas", laughs()), "betas: got a value of type list"),
    "amsgrad of a tensor": (setting("amsgrad", torch.ones(2)), "amsgrad: got a value"),
    "decay of a tensor": (setting("decoupled_weight_decay", torch.ones(2)), "decoupled_weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_dict_with_what_no_save_writes_is_refused_and_nothing_changes(name):
    change, message = REFUSED[name]
    saved = copy.copy(saved_state(plain_optimizer))
    saved["state"] = {key: dict(one) for key, one in saved["state"].items()}
    saved["param_groups"] = [
        {**group, "params": list(group["params"])} for group in saved["param_groups"]
    ]
    params, optimizer = plain_optimizer()
    take_steps(params, optimizer, 1)
    assert load_and_step(plain_optimizer, saved) == "loaded"
    change(saved)
    before = digest(optimizer)
    with pytest.raises(ValueError, match=message) as raised:
        optimizer.load_state_dict(saved)
    assert len(str(raised.value)) < 1000
    assert digest(optimizer) == before
