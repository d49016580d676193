# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's tests of optimizers (its test/test_optim.py) ask, asked of Adam8bitBlockwise.

Where the answer is a matter of torch's interface, torch.optim.AdamW beside it gives the answer.
"""

import copy
import pickle
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from nests import assert_same
from small_optimizers import assert_equal, param, run, set_grads, small_model, through_file
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.optim import AdamW, lr_scheduler, swa_utils
from torch.optim import optimizer as torch_optimizer

from zero8 import Adam8bitBlockwise

pytestmark = pytest.mark.usefixtures("one_torch_thread")
BF16 = torch.bfloat16


def trained(named: bool = False):
    """Return a model and its optimizer; rounding to bfloat16 shows the identities of the dither."""
    model = small_model(BF16)
    optimizer = Adam8bitBlockwise(params_of(model, named), lr=0.1)
    run(optimizer, list(model.parameters()), 2)
    return model, optimizer


def params_of(model, named: bool):
    return model.named_parameters() if named else model.parameters()


def model_like(model):
    other = small_model(BF16)
    other.load_state_dict(model.state_dict())
    return other


def loss_of(model, step: int):
    return model(torch.randn(4, 300, generator=torch.Generator().manual_seed(step))).square().mean()


def everything(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def assert_go_on_alike(model, optimizer, other, its_optimizer) -> None:
    for step in (2, 3):
        run(optimizer, list(model.parameters()), 1, start=step)
        run(its_optimizer, list(other.parameters()), 1, start=step)
        assert_equal(model.parameters(), other.parameters())


# --- Settings and groups -------------------------------------------------------------------------


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


REFUSED_GROUPS = {
    "known parameter": (lambda known: {"params": [("again", known)]}, ValueError),
    "no name": (lambda known: {"params": [param(64, 128)]}, ValueError),
    "list": (lambda known: [("new", param(64, 128))], TypeError),
    "bad lr": (lambda known: {"params": [("new", param(64, 128))], "lr": -1.0}, ValueError),
}


@pytest.mark.parametrize(("make", "error"), REFUSED_GROUPS.values(), ids=REFUSED_GROUPS)
def test_group_refused_in_training_leaves_the_optimizer_as_it_was(make, error):
    model, optimizer = trained(named=True)
    before = everything(model, optimizer)
    with pytest.raises(error):
        optimizer.add_param_group(make(model[0].weight))
    assert_same(everything(model, optimizer), before)
    assert_go_on_alike(model, optimizer, *trained(named=True))


LRS = {
    "float32": torch.tensor(0.5),
    "1 dimension": torch.tensor([0.5]),
    "2 dimensions": torch.tensor([[0.5]]),
    "float64": torch.tensor(0.5, dtype=torch.float64),
}


@pytest.mark.parametrize("value", LRS.values(), ids=LRS)
def test_lr_as_a_tensor_of_any_kind_under_a_schedule_steps_as_a_number(value):
    lr, params = value.clone(), [param(64, 128) for _ in range(2)]
    optimizers = [Adam8bitBlockwise([p], lr=one) for p, one in zip(params, (lr, 0.5), strict=True)]
    schedules = [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    for step in range(4):
        for p, optimizer, schedule in zip(params, optimizers, schedules, strict=True):
            run(optimizer, [p], 1, start=step)
            schedule.step()
    assert torch.equal(*params)
    assert optimizers[0].param_groups[0]["lr"] is lr and lr.item() == 0.5**5


# --- Steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("steps", [0, 2])
def test_step_without_any_gradient_changes_nothing(steps, weight_decay):
    model = small_model()
    optimizer = Adam8bitBlockwise(model.parameters(), weight_decay=weight_decay)
    run(optimizer, list(model.parameters()), steps)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    before = everything(model, optimizer)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert_same(everything(model, optimizer), before)


def test_scalar_parameter_follows_adamw_and_is_saved_and_loaded():
    """CLIP's logit_scale is one."""
    ours, theirs = (nn.Parameter(torch.tensor(2.0)) for _ in range(2))
    optimizer, adamw = Adam8bitBlockwise([ours], lr=0.1), AdamW([theirs], lr=0.1, weight_decay=0.0)
    for step in range(4):
        run(optimizer, [ours], 1, start=step)
        run(adamw, [theirs], 1, start=step)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
    resumed = nn.Parameter(ours.detach().clone())
    other = Adam8bitBlockwise([resumed])
    other.load_state_dict(through_file(optimizer.state_dict()))
    run(optimizer, [ours], 2, start=4)
    run(other, [resumed], 2, start=4)
    assert torch.equal(resumed, ours) and resumed.shape == ()


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


class FromConfig(Sequence):
    """A list of a config library, which no file of weights alone may carry."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


OF_CONFIGS = {
    "lr": np.float64(0.5),
    "betas": FromConfig(0.75, np.float32(0.5)),
    "eps": np.array(0.25),
    "weight_decay": np.int64(0),
    "maximize": np.bool_(True),
    "its own": FromConfig("text", np.float64(1.0)),
}
PLAIN = {
    "lr": 0.5,
    "betas": (0.75, 0.5),
    "eps": 0.25,
    "weight_decay": 0,
    "maximize": True,
    "its own": ("text", 1.0),
}
WAYS = {
    "constructor": lambda p: Adam8bitBlockwise([{"params": [p], **OF_CONFIGS}]),
    "load": lambda p: Adam8bitBlockwise([p]),
    "assignment": lambda p: Adam8bitBlockwise([p]),
}


@pytest.mark.parametrize("way", WAYS)
def test_settings_of_numpy_and_config_libraries_are_saved_as_plain_numbers(way):
    optimizer = WAYS[way](param(64, 128))
    if way == "load":
        saved = optimizer.state_dict()
        saved["param_groups"][0] |= OF_CONFIGS
        optimizer.load_state_dict(saved)
    if way == "assignment":
        optimizer.param_groups[0] |= OF_CONFIGS
    run(optimizer, optimizer.param_groups[0]["params"], 1)
    kept = through_file(optimizer.state_dict())["param_groups"][0]
    live = kept if way == "assignment" else optimizer.param_groups[0]
    for group in (kept, live):
        for key, value in PLAIN.items():
            assert group[key] == value and type(group[key]) is type(value), key
            assert list(map(type, group["betas"])) == [float, float]


LAZY = {
    "linear": (lambda: nn.LazyLinear(64), (2, 128)),
    "conv": (lambda: nn.LazyConv2d(64, 3), (2, 16, 4, 4)),
}


@pytest.mark.parametrize(("make", "shape"), LAZY.values(), ids=LAZY)
def test_optimizer_of_a_lazy_module_steps_as_one_made_after_its_first_input(make, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def trained(is_late: bool):
        torch.manual_seed(0)
        model = make()
        if is_late:
            model(x)
        names = [("lazy." + name, p) for name, p in model.named_parameters()]
        optimizer = Adam8bitBlockwise(names[:1], lr=0.1, fp32_params=["*bias"])
        optimizer.add_param_group({"params": names[1:]})
        optimizer.step()  # without gradients
        assert optimizer.memory_report().rows == () and optimizer.state_dict()["state"] == {}
        for _ in range(2):
            model(x).square().sum().backward()
            optimizer.step()
        return model, optimizer

    (ours, optimizer), (theirs, expected) = trained(False), trained(True)
    assert_equal(ours.parameters(), theirs.parameters())
    assert optimizer.memory_report().rows == expected.memory_report().rows
    assert_same(optimizer.state_dict(), expected.state_dict())


def test_load_state_dict_before_the_first_input_of_a_lazy_module_raises():
    model = nn.LazyLinear(64)
    adamw, optimizer = AdamW([param(64, 128)]), Adam8bitBlockwise([model.weight])
    run(adamw, adamw.param_groups[0]["params"], 1)
    with pytest.raises(ValueError, match="call the model on a batch before load_state_dict"):
        optimizer.load_state_dict(adamw.state_dict())
    assert not optimizer.state


def test_step_between_forward_and_backward_is_noticed_by_autograd():
    p = nn.Parameter(torch.full((64, 128), 2.0))
    optimizer = Adam8bitBlockwise([p])
    loss = (p * p).sum()
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameter_frozen_with_its_gradient_left_is_stepped_as_by_adamw():
    """It is the gradient that torch's optimizers ask for, not `requires_grad`."""
    for cls in (AdamW, Adam8bitBlockwise):
        p = param(64, 128).requires_grad_(False)
        p.grad = torch.ones(64, 128)
        cls([p], lr=0.5, weight_decay=0.0).step()
        torch.testing.assert_close(p, param(64, 128).detach() - 0.5, rtol=0.0, atol=1e-6)


# --- Hooks, and the profiler ---------------------------------------------------------------------


def calls_of_hooks(cls) -> list:
    """Return the calls of every kind of hook around steps, a save and a load, with arguments."""
    p, calls = param(64, 128), []
    optimizer = cls([p])
    set_grads([p], 0)

    def note(name):
        # Positional arguments of a step by their number, keywords and dicts by their keys.
        seen = {tuple: len, dict: sorted}
        return lambda _, *args: calls.append((name, *(seen[type(one)](one) for one in args)))

    with ExitStack() as hooks:
        for register in (
            torch_optimizer.register_optimizer_step_pre_hook,
            torch_optimizer.register_optimizer_step_post_hook,
            optimizer.register_step_pre_hook,
            optimizer.register_step_post_hook,
        ):
            hooks.enter_context(register(note(register.__name__)))
        for register in (
            optimizer.register_state_dict_pre_hook,
            optimizer.register_state_dict_post_hook,
            optimizer.register_load_state_dict_pre_hook,
            optimizer.register_load_state_dict_post_hook,
        ):
            for place in ("last", "first"):
                hook = note(f"{register.__name__} {place}")
                hooks.enter_context(register(hook, prepend=place == "first"))
        optimizer.step()
        optimizer.step(lambda: 1.0)
        optimizer.step(closure=lambda: 1.0)
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return calls


def test_hooks_of_all_kinds_are_called_as_those_of_adamw():
    calls = calls_of_hooks(Adam8bitBlockwise)
    assert calls == calls_of_hooks(AdamW)
    assert len(calls) == 3 * 4 + 4 * 2


@pytest.mark.parametrize("when", ["pre", "post"])
def test_load_state_dict_whose_hook_raises_changes_nothing(when):
    model, optimizer = trained()
    before = everything(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    saved["state"][0]["step"] = 9

    def refuse(*args):
        raise RuntimeError("not this one")

    hook = getattr(optimizer, f"register_load_state_dict_{when}_hook")(refuse)
    with pytest.raises(RuntimeError, match="not this one"):
        optimizer.load_state_dict(saved)
    hook.remove()
    assert_same(everything(model, optimizer), before)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 7.0
    assert optimizer.state[model[0].weight]["step"] == 9


# --- State dicts and copies ----------------------------------------------------------------------


def test_state_dict_has_adamws_keys_in_its_groups():
    ours, theirs = (cls([param(64, 128)]).state_dict() for cls in (Adam8bitBlockwise, AdamW))
    assert ours.keys() == theirs.keys()
    newest = {"decoupled_weight_decay"}  # which the AdamW of earlier torch does not have
    assert set(ours["param_groups"][0]) == set(theirs["param_groups"][0]) | newest


def test_state_dict_without_the_newer_keys_of_groups_loads_and_goes_on():
    model, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    for key in set(saved["param_groups"][0]) - {"params", "lr", "betas", "eps", "weight_decay"}:
        del saved["param_groups"][0][key]
    other = model_like(model)
    resumed = Adam8bitBlockwise(other.parameters(), lr=7.0)
    resumed.load_state_dict(saved)
    assert_same(resumed.state_dict(), optimizer.state_dict())
    assert_go_on_alike(model, optimizer, other, resumed)


def test_unknown_keys_of_groups_survive_steps_saves_loads_and_copies():
    """torchtitan's, DeepSpeed's and others' notes; a checkpoint brings its own."""
    notes = {"moe": True, "name": "experts", "initial_lr": 0.5, "fused": True, "tags": ["a", {}]}
    model = small_model(BF16)
    optimizer = Adam8bitBlockwise([{"params": list(model.parameters()), **notes}])
    run(optimizer, list(model.parameters()), 2)
    saved = through_file(optimizer.state_dict())
    saved["param_groups"][0]["stage"] = 2
    other = model_like(model)
    resumed = Adam8bitBlockwise(other.parameters())
    resumed.load_state_dict(saved)
    assert_go_on_alike(model, optimizer, other, resumed)
    assert notes.items() <= optimizer.param_groups[0].items()
    for one in (resumed, copy.deepcopy(resumed)):
        for groups in (one.param_groups, one.state_dict()["param_groups"]):
            assert (notes | {"stage": 2}).items() <= groups[0].items()


@pytest.mark.parametrize("saved_named", [True, False], ids=["saved named", "saved unnamed"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_state_dict_with_or_without_names_loads_into_either_and_goes_on(saved_named, named):
    model, optimizer = trained(saved_named)
    other = model_like(model)
    resumed, adamw = (cls(params_of(other, named)) for cls in (Adam8bitBlockwise, AdamW))
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    adamw.load_state_dict(AdamW(params_of(model, saved_named)).state_dict())
    names = [one.param_groups[0].get("param_names") for one in (resumed, adamw)]
    assert names[0] == names[1]
    assert_go_on_alike(model, optimizer, other, resumed)


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_states_under_the_names_of_distributed_checkpoints_load_and_go_on(named, flat):
    """`set_state_dict` takes a step with an lr of 0 to make the states that it replaces."""
    model, optimizer = trained(named)
    optimizer.zero_grad()
    options = checkpoints.StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = through_file(checkpoints.get_state_dict(model, optimizer, options=options))
    assert ("state.0.weight.exp_avg_q8" in states) is flat
    other = small_model(BF16)
    resumed = Adam8bitBlockwise(params_of(other, named))
    checkpoints.set_state_dict(
        other, resumed, model_state_dict=weights, optim_state_dict=states, options=options
    )
    assert_same(resumed.state_dict(), optimizer.state_dict())
    assert_go_on_alike(model, optimizer, other, resumed)


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


# --- Schedules -----------------------------------------------------------------------------------

# Those that write numbers, and in cycles betas as well; by a list, by a measure, one after another.
SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda t: 0.9**t, lambda t: 1 / (1 + t)]),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.5, anneal_epochs=3),
}
schedules = pytest.mark.parametrize("schedule_of", SCHEDULES.values(), ids=SCHEDULES)
lr_types = pytest.mark.parametrize("lr_type", [float, torch.tensor], ids=["number", "tensor"])


def scheduled(cls, schedule_of, lr_type):
    """Return a matrix and vectors in two groups, with their optimizer and its schedule."""
    params = [param(64, 128), param(50, seed=1), param(50, seed=2)]
    groups = [
        {"params": params[:2], "lr": lr_type(0.05)},
        {"params": params[2:], "lr": lr_type(0.01)},
    ]
    optimizer = cls(groups, weight_decay=0.0)
    return params, optimizer, schedule_of(optimizer)


def run_scheduled(params, optimizer, schedule, step: int) -> None:
    run(optimizer, params, 1, start=step)
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        schedule.step(1.0)
    else:
        schedule.step()


def what_is_scheduled(optimizer) -> list:
    groups = optimizer.param_groups
    return [(type(group["lr"]), float(group["lr"]), *group["betas"]) for group in groups]


@schedules
@lr_types
def test_schedule_of_any_class_goes_as_with_adamw_and_every_step_takes_its_values(
    schedule_of, lr_type
):
    ours = scheduled(Adam8bitBlockwise, schedule_of, lr_type)
    theirs = scheduled(AdamW, schedule_of, lr_type)
    (matrix, *vectors), (its_matrix, *its_vectors) = ours[0], theirs[0]
    before, seen = matrix.detach().clone(), []
    for step in range(6):
        seen.append(what_is_scheduled(ours[1]))
        assert seen[-1] == what_is_scheduled(theirs[1])
        run_scheduled(*ours, step)
        run_scheduled(*theirs, step)
        torch.testing.assert_close(vectors, its_vectors, rtol=1e-6, atol=1e-6)
        assert (matrix - its_matrix).norm() < 0.02 * (its_matrix - before).norm()
    assert all(len(set(of_group)) > 1 for of_group in zip(*seen, strict=True))


# --- Other parts of torch ------------------------------------------------------------------------


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


def test_compiled_models_parameters_have_the_names_of_the_models_own(caplog):
    model = torch.compile(nn.Sequential(nn.Linear(128, 64)), backend="eager")
    optimizer = Adam8bitBlockwise(model.named_parameters(), fp32_params=["0.weight", "0.wieght"])
    model(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    (row,) = [row for row in optimizer.memory_report().rows if row.name == "0.weight"]
    assert row.bits == 32
    assert "no parameter has a name that matches '0.wieght'; names like it: 0.weight" in caplog.text
