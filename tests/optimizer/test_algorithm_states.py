# SPDX-License-Identifier: Apache-2.0
"""The states of each algorithm: what is in them, where they go and come from."""

import copy

import pytest
import torch
from nests import assert_same
from small_optimizers import (
    LR,
    OPTIONS,
    param,
    run,
)
from torch import nn

import zero8
from zero8 import Adam8bitBlockwise, AdEMAMix8bitBlockwise, Lion8bitBlockwise, SGD8bitBlockwise

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ADAM, LION, SGD, MIX = Adam8bitBlockwise, Lion8bitBlockwise, SGD8bitBlockwise, AdEMAMix8bitBlockwise
every = pytest.mark.parametrize("made", OPTIONS, ids=lambda one: one.algorithm.name)
one_moment = pytest.mark.parametrize("made", [LION, SGD], ids=lambda one: one.algorithm.name)


def entry_of(made) -> str:
    """Return the moment's entry in fp32 states."""
    return made.algorithm.moment_names[0]


def moment_of(optimizer, p) -> torch.Tensor:
    return optimizer.moments(p)[0].read(0, p.numel()).view(p.shape)


@every
def test_algorithm_state_has_its_bytes(made):
    p = param(64, 512)
    algorithm, optimizer = made.algorithm, made([("w", p)], **OPTIONS[made])
    run(optimizer, [p], 2)
    state = optimizer.state[p]
    moments = [f"{name}{kind}" for name in algorithm.moment_names for kind in ("_q8", "_scale")]
    memory = [one.name for one in algorithm.memory]
    assert sorted(state) == sorted(["format", "step", *memory, *moments])
    assert state["format"].tolist()[:2] == [1, algorithm.number]
    (row,) = optimizer.memory_report().rows
    scales = {ADAM: 3, MIX: 4}.get(made, 1)  # v has two
    assert row.state_bytes == len(algorithm.moments) * 64 * 512 + 4 * scales * 64 * 2


@one_moment
def test_one_moment_of_another_library_loads_without_a_step(made):
    """The states of the usual Lion and of torch's SGD are their moments alone."""
    p = param(20, 300)
    moment = param(20, 300, seed=1).detach()
    group = {"params": [0], **OPTIONS[made], "lr": 3e-4}
    optimizer = made([p], **OPTIONS[made])
    optimizer.load_state_dict({"state": {0: {entry_of(made): moment}}, "param_groups": [group]})
    assert optimizer.state[p]["step"] == (1 if made is SGD else 0)
    assert optimizer.param_groups[0]["lr"] == 3e-4
    assert (moment_of(optimizer, p) - moment).abs().max() < 0.04 * moment.abs().max()
    run(optimizer, [p], 1)


def test_sgd_states_of_torch_go_in_and_out():
    """With dampening, which torch leaves out in the first step only."""
    options = {"lr": LR, "momentum": 0.9, "dampening": 0.5}
    theirs, ours = param(20, 300), param(20, 300)
    of_torch = torch.optim.SGD([theirs], **options)
    run(of_torch, [theirs], 2)
    ours.data.copy_(theirs)
    optimizer = SGD8bitBlockwise([ours], min_8bit_size=10**9, **options)
    optimizer.load_state_dict(of_torch.state_dict())
    for one, p in ((of_torch, theirs), (optimizer, ours)):
        run(one, [p], 2, start=2)
    assert torch.allclose(theirs, ours, rtol=1e-6, atol=1e-7)
    back = torch.optim.SGD([nn.Parameter(ours.detach().clone())], **options)
    back.load_state_dict(copy.deepcopy(zero8.export(optimizer)))
    (p,) = back.param_groups[0]["params"]
    for one, q in ((optimizer, ours), (back, p)):
        run(one, [q], 2, start=4)
    assert torch.allclose(p, ours, rtol=1e-6, atol=1e-7)


def states_of(optimizer_class, **keywords):
    p = param(20, 300)
    optimizer = optimizer_class([p], **OPTIONS.get(optimizer_class, {}) | keywords)
    run(optimizer, [p], 1)
    return optimizer.state_dict()


FOREIGN = {
    "Lion from Adam": (LION, states_of, Adam8bitBlockwise, "one of Adam8bitBlockwise"),
    "Adam from Lion": (Adam8bitBlockwise, states_of, LION, "one of Lion8bitBlockwise"),
    "SGD from Lion": (SGD, states_of, LION, "one of Lion8bitBlockwise"),
    "Lion from AdamW": (LION, states_of, torch.optim.AdamW, "one of an fp32 Adam"),
    "AdEMAMix from Adam": (MIX, states_of, Adam8bitBlockwise, "betas: got .* three numbers"),
    "Adam from AdEMAMix": (Adam8bitBlockwise, states_of, MIX, "betas: got .* two numbers"),
    "Lion from AdEMAMix": (LION, states_of, MIX, "betas: got .* two numbers"),
    "SGD from AdamW": (SGD, states_of, torch.optim.AdamW, r"without \['momentum_buffer'\]"),
    "Adam from an fp32 Lion": (
        Adam8bitBlockwise,
        lambda lion: states_of(lion, state_dict_format="fp32"),
        LION,
        r"without \['exp_avg_sq'\]",
    ),
}


@pytest.mark.parametrize(("ours", "make", "theirs", "message"), FOREIGN.values(), ids=FOREIGN)
def test_states_of_other_algorithms_are_refused(ours, make, theirs, message):
    p = param(20, 300)
    optimizer = ours([p], **OPTIONS.get(ours, {}))
    run(optimizer, [p], 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(make(theirs))
    assert_same(optimizer.state_dict()["state"], before["state"])
