# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's tests of optimizers (its test/test_optim.py) ask, asked of Adam8bitBlockwise.

Where the answer is a matter of torch's interface, torch.optim.AdamW beside it gives the answer.
"""

import copy
import pickle
from collections import UserList

import numpy as np
import pytest
import torch
from nests import assert_same
from small_optimizers import assert_equal, param, run, set_grads, small_model, through_file
from torch import nn
from torch.optim import AdamW, lr_scheduler

from zero8 import Adam8bitBlockwise, Muon8bitBlockwise
from zero8.optimizer.states import HoldsStates

pytestmark = pytest.mark.usefixtures("one_torch_thread")
BF16 = torch.bfloat16


def loss_of(model, step: int):
    return model(torch.randn(4, 300, generator=torch.Generator().manual_seed(step))).square().mean()


def everything(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


# --- Settings and groups ------------------------------------------------------------------------


def test_group_that_joins_in_training_steps_as_in_an_optimizer_of_its_own():
    its_own = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.2}
    newer = {"lr": 0.5, "eps": 1e-3, "maximize": True}
    together, apart = ([param(64, 128, seed=n, dtype=BF16) for n in range(2)] for _ in range(2))
    joint = Adam8bitBlockwise([{"params": [("old", together[0])], **its_own}])
    old = Adam8bitBlockwise([("old", apart[0])], **its_own)
    run(joint, together[:1], 2)
    run(old, apart[:1], 2)
    joint.add_param_group({"params": [("new", together[1])], **newer})
    new = Adam8bitBlockwise([("new", apart[1])], **newer)
    for step in (2, 3):
        run(joint, together, 1, start=step)
        set_grads(apart, step)
        old.step()
        new.step()
        assert_equal(together, apart)
    assert [joint.state[p]["step"] for p in together] == [4, 2]


# --- Steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_parameter_twice_in_a_group_warns_as_torch_does_and_steps_once(named):
    def made(cls, *params):
        members = [(str(n), p) for n, p in enumerate(params)] if named else params
        return cls(members, lr=0.1, weight_decay=0.0)

    (twice, bias), once = (param(64, 128), param(64)), (param(64, 128), param(64))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer, theirs = made(Adam8bitBlockwise, twice, twice, bias), made(AdamW, twice, twice)
    plain = made(Adam8bitBlockwise, *once)
    for step in range(2):
        set_grads([twice, bias], step), set_grads(once, step)
        assert torch.equal(optimizer.clip_grad_norm_(0.3), plain.clip_grad_norm_(0.3))
        optimizer.step(), plain.step()
        assert_equal([twice, bias], once)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert optimizer.state[twice]["step"] == 2
    assert (
        saved["param_groups"][0]["params"][:2] == theirs.state_dict()["param_groups"][0]["params"]
    )
    assert list(saved["state"]) == [1, 2] and len(optimizer.memory_report().rows) == 2


# As given by numpy and by lists of config libraries, which no file of weights alone may carry; and
# as they are to be kept.
OF_CONFIGS = {
    "lr": (np.float64(0.5), 0.5),
    "betas": (UserList([0.75, np.float32(0.5)]), (0.75, 0.5)),
    "eps": (np.array(0.25), 0.25),
    "weight_decay": (np.int64(0), 0),
    "maximize": (np.bool_(True), True),
    "its own": (UserList(["text", np.float64(1.0)]), ("text", 1.0)),
}
GIVEN = {key: given for key, (given, _) in OF_CONFIGS.items()}
WAYS = {
    "constructor": lambda p: Adam8bitBlockwise([{"params": [p], **GIVEN}]),
    "load": lambda p: Adam8bitBlockwise([p]),
    "assignment": lambda p: Adam8bitBlockwise([p]),
}


@pytest.mark.parametrize("way", WAYS)
def test_settings_of_numpy_and_config_libraries_are_saved_as_plain_numbers(way):
    optimizer = WAYS[way](param(64, 128))
    if way == "load":
        saved = optimizer.state_dict()
        saved["param_groups"][0] |= GIVEN
        optimizer.load_state_dict(saved)
    if way == "assignment":
        optimizer.param_groups[0] |= GIVEN
    run(optimizer, optimizer.param_groups[0]["params"], 1)
    kept = through_file(optimizer.state_dict())["param_groups"][0]
    live = kept if way == "assignment" else optimizer.param_groups[0]
    for group in (kept, live):
        for key, (_, value) in OF_CONFIGS.items():
            assert group[key] == value and type(group[key]) is type(value), key
            assert list(map(type, group["betas"])) == [float, float]


@pytest.mark.parametrize("cls", [Adam8bitBlockwise, Muon8bitBlockwise])
def test_optimizer_of_a_lazy_module_raises_until_it_has_seen_an_input(cls):
    model, optimizer = nn.LazyLinear(64), cls([("first", param(64, 128))])
    for use in (cls, lambda named: optimizer.add_param_group({"params": list(named)})):
        with pytest.raises(RuntimeError, match="Call `forward` to initialize the parameters"):
            use(model.named_parameters())
    assert len(optimizer.param_groups) == 1
    model(torch.ones(2, 128))
    optimizer.add_param_group({"params": list(model.named_parameters())})


# --- Schedules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lr_type", [float, torch.tensor], ids=["number", "tensor"])
def test_schedule_of_rates_and_betas_goes_as_with_adamw_and_every_step_takes_its_values(lr_type):
    runs = []
    for cls in (Adam8bitBlockwise, AdamW):
        vector, seen = param(50), []
        optimizer = cls([{"params": [vector], "lr": lr_type(0.05)}], weight_decay=0.0)
        schedule = lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-1, 2)
        for step in range(6):
            (group,) = optimizer.param_groups
            seen.append((type(group["lr"]), float(group["lr"]), *group["betas"]))
            run(optimizer, [vector], 1, start=step)
            schedule.step()
        runs.append((vector, seen))
    (ours, found), (theirs, expected) = runs
    assert found == expected and len({betas for *_, betas, _ in found}) > 1
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


# --- Other parts of torch -----------------------------------------------------------------------


@pytest.mark.parametrize("unscales", [True, False], ids=["unscale_", "step only"])
def test_grad_scaler_steps_as_without_it_and_skips_infinite_gradients(unscales):
    """Scales are powers of two, so that unscaled gradients have the bits of those never scaled."""
    (model, other), scaler = (small_model(), small_model()), torch.amp.GradScaler("cpu", 1024.0)
    optimizer, plain = (Adam8bitBlockwise(each.parameters(), lr=0.01) for each in (model, other))
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if overflows := step == 2:
            model[0].weight.grad[3, 7] = float("inf")
        before = everything(model, optimizer)
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            assert_same(everything(model, optimizer), before)
        else:
            plain.zero_grad()
            loss_of(other, step).backward()
            plain.step()
        assert_equal(model.parameters(), other.parameters())
    assert scaler.get_scale() == 512.0 and optimizer.nonfinite_blocks == 0


# --- Hooks, state dicts and copies ----------------------------------------------------------------


def trained():
    """Return a model and its optimizer; rounding to bfloat16 shows the identities of the dither."""
    model = small_model(BF16)
    optimizer = Adam8bitBlockwise(model.parameters(), lr=0.1)
    run(optimizer, list(model.parameters()), 2)
    return model, optimizer


def assert_go_on_alike(model, optimizer, other, its_optimizer) -> None:
    for step in (2, 3):
        run(optimizer, list(model.parameters()), 1, start=step)
        run(its_optimizer, list(other.parameters()), 1, start=step)
        assert_equal(model.parameters(), other.parameters())


@pytest.mark.parametrize(
    ("when", "error"),
    [("pre", RuntimeError), ("between", KeyboardInterrupt), ("post", RuntimeError)],
)
def test_load_state_dict_that_a_hook_or_ctrl_c_ends_changes_nothing(when, error, monkeypatch):
    model, optimizer = trained()
    other, twin = copy.deepcopy((model, optimizer))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    saved["state"][0]["step"] = 9

    def interrupt(*args):
        raise error

    with monkeypatch.context() as patch:
        if when == "between":  # the first state and the second
            calls = iter([HoldsStates.adopted, interrupt])
            patch.setattr(HoldsStates, "adopted", lambda *args: next(calls)(*args))
        else:
            hook = getattr(optimizer, f"register_load_state_dict_{when}_hook")(interrupt)
        with pytest.raises(error):
            optimizer.load_state_dict(saved)
    if when != "between":
        hook.remove()
    assert_same(everything(model, optimizer), everything(other, twin))
    assert_go_on_alike(model, optimizer, other, twin)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 7.0
    assert optimizer.state[model[0].weight]["step"] == 9


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda both: pickle.loads(pickle.dumps(both))}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_copy_of_an_optimizer_under_a_schedule_and_hooks_is_free_of_them(duplicate):
    model, optimizer = trained()
    calls, schedule = [], lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *args: calls.append(args[0]))
    optimizer.register_load_state_dict_post_hook(calls.append)
    other, copied = duplicate((model, optimizer))
    public = [{key for key in vars(one) if key[0] != "_"} for one in (optimizer, copied)]
    assert public[0] - {"step"} == public[1]  # the schedule counts the original's steps
    copied.load_state_dict(copied.state_dict())
    assert_go_on_alike(model, optimizer, other, copied)
    assert calls == [optimizer] * 2
    schedule.step()
    assert copied.param_groups[0]["lr"] == 0.1 != optimizer.param_groups[0]["lr"]
