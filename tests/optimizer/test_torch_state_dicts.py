# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's tests ask of an optimizer's hooks, state dicts and copies, asked of ours."""

import copy
import pickle

import pytest
import torch
from nests import assert_same
from small_optimizers import assert_equal, run, small_model, through_file
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.optim import lr_scheduler

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


def everything(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def assert_go_on_alike(model, optimizer, other, its_optimizer) -> None:
    for step in (2, 3):
        run(optimizer, list(model.parameters()), 1, start=step)
        run(its_optimizer, list(other.parameters()), 1, start=step)
        assert_equal(model.parameters(), other.parameters())


# --- Hooks  ---------------------------------------------------------------------


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
