# SPDX-License-Identifier: Apache-2.0
"""What the optimizer keeps of a parameter from step to step, when tensors move or change."""

import copy
import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from small_optimizers import named_params, param, run, set_grads

import zero8
from zero8.optimizer import stepper

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SHAPES = {"a": (64, 100), "b": (33,), "c": (70, 300)}


def made():
    params = named_params(SHAPES)
    return params, zero8.Adam8bitBlockwise(params.items(), lr=1e-2)


def test_states_and_parameters_that_are_dropped_are_freed_although_steps_have_seen_them():
    params, optimizer = made()
    run(optimizer, params.values(), 1, start=0)
    p, codes = (weakref.ref(x) for x in (params["a"], optimizer.state[params["a"]]["exp_avg_q8"]))
    optimizer.state.clear()
    gc.collect()
    assert codes() is None
    run(optimizer, params.values(), 1, start=1)
    assert optimizer.state[params["a"]]["step"] == 1
    optimizer.state.clear()
    optimizer.param_groups.clear()
    params.clear()
    gc.collect()
    assert p() is None


def test_state_restored_in_place_continues_its_own_dither():
    """The identity in `format` decides the thresholds; copying into the tensors moves nothing."""
    params, optimizer = made()
    run(optimizer, params.values(), 1, start=0)
    optimizer.state[params["c"]]["format"][4] += 12345
    fresh, other = copy.deepcopy((params, optimizer))
    for number in (1, 2):
        run(optimizer, params.values(), 1, start=number)
        run(other, fresh.values(), 1, start=number)
    assert torch.equal(params["c"], fresh["c"])
    for which in ("exp_avg_q8", "exp_avg_sq_q8"):
        mine, theirs = (o.state[ps["c"]][which] for o, ps in ((optimizer, params), (other, fresh)))
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("rows", [32, 128])
def test_parameter_that_changes_its_size_raises(rows):
    params, optimizer = made()
    run(optimizer, params.values(), 1, start=0)
    params["a"].data = torch.zeros(rows, 100)
    with pytest.raises(ValueError, match=f"a: got a parameter of {100 * rows} elements, its state"):
        run(optimizer, params.values(), 1, start=1)


def test_steady_step_passes_few_python_files():
    params, optimizer = made()
    run(optimizer, params.values(), 3)
    set_grads(params.values(), 3)
    folder, calls = str(Path(zero8.__file__).parent), []

    def note(frame, event, _):
        if event == "call" and (path := frame.f_code.co_filename).startswith(folder):
            calls.append(path)

    sys.setprofile(note)
    optimizer.step()
    sys.setprofile(None)
    assert len(calls) <= 36 and len(set(calls)) <= 6


def test_parts_of_the_parameters_that_step_in_turns_keep_their_plans(monkeypatch):
    """As the sub-groups of ZeRO-3, which the optimizer meets one by one."""
    params, optimizer = made()
    plans, planned = [], stepper.planned
    monkeypatch.setattr(stepper, "planned", lambda *args: plans.append(1) or planned(*args))
    for number in range(3):
        for names in (("a",), ("b", "c")):
            optimizer.param_groups[0]["params"] = [params[name] for name in names]
            run(optimizer, params.values(), 1, start=number)
    assert len(plans) == 2


SHARED = {
    "whole": lambda x: (x, x),
    "rows in part": lambda x: (x[:100], x[50:]),
    "transposed": lambda x: (x, x.t()),
    "float32 moments": lambda x: (x.view(-1), x[0]),
}
MAKERS = {
    "Adam": zero8.Adam8bitBlockwise,
    "Adam bf16": zero8.Adam8bitBlockwise,
    "SGD": lambda groups: zero8.SGD8bitBlockwise(groups, momentum=0.9),
    "Muon": lambda groups: zero8.Muon8bitBlockwise(groups, ns_dtype="float32"),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("views", SHARED.values(), ids=SHARED)
def test_parameters_that_share_memory_step_one_after_the_other(views, maker):
    """In the order of the groups, on any number of threads; also when they are tied late."""
    torch.set_num_threads(2)  # one_torch_thread restores it
    dtype = torch.bfloat16 if "bf16" in maker else torch.float32

    def trained(are_together):
        buffer = param(128, 128, dtype=dtype).detach()
        parts = views(buffer)
        params = {name: torch.nn.Parameter(x.clone()) for name, x in zip("ab", parts, strict=True)}
        groups = [{"params": [pair], "lr": 0.01} for pair in params.items()]
        of = MAKERS[maker]
        optimizers = [of(groups)] if are_together else [of([group]) for group in groups]
        for step in range(4):
            set_grads(params.values(), step)
            for optimizer in optimizers:
                optimizer.step()
            for p, x in zip(params.values(), parts, strict=True):
                p.data = x
        return buffer

    assert torch.equal(trained(True), trained(False))
