# SPDX-License-Identifier: Apache-2.0
"""`optimizer.clip_grad_norm_`: the norm, and the bits of torch's clipping by it in the step."""

import pytest
import torch
from nests import assert_same
from small_optimizers import named_params, required_by, set_grads, small_model

from zero8 import Adam8bitBlockwise
from zero8.optimizer.elementwise import OPTIMIZERS

SHAPES = {"wide": (64, 96), "narrow": (300, 7), "conv": (8, 16, 3, 3), "bias": (96,)}


def params_of(dtype=torch.float32):
    params = named_params(SHAPES, dtype)
    params["conv"].data = params["conv"].data.to(memory_format=torch.channels_last)
    return list(params.values())


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("max_norm", "norm_type"), [(1.0, 2.0), (0.01, 1.0), (0.3, float("inf")), (1e9, 2.0)]
)
def test_clip_equals_torchs_clipping_before_the_step(optimizer_class, dtype, max_norm, norm_type):
    ours, theirs = params_of(dtype), params_of(dtype)
    options = {"lr": 0.01, **required_by(optimizer_class)}
    optimizer, plain = optimizer_class(ours, **options), optimizer_class(theirs, **options)
    for step in range(3):
        set_grads(ours, step)
        set_grads(theirs, step)
        norm = optimizer.clip_grad_norm_(max_norm, norm_type)
        if norm_type == 2.0:
            expected = torch.cat([p.grad.flatten().double() for p in theirs]).norm()
            assert abs(norm.double() / expected - 1) <= 2**-23
        else:
            grads = [p.grad for p in theirs]
            assert torch.equal(norm, torch.nn.utils.get_total_norm(grads, norm_type))
        torch.nn.utils.clip_grads_with_norm_(theirs, max_norm, norm)
        before = [p.grad.clone() for p in ours]
        optimizer.step(), plain.step()
        assert_same(before, [p.grad for p in ours])
        assert_same(ours, theirs)
    assert_same(optimizer.state_dict()["state"], plain.state_dict()["state"])


@pytest.fixture
def pair():
    models = small_model(), small_model()
    params = [list(model.parameters()) for model in models]
    return params, [Adam8bitBlockwise(one, lr=0.1) for one in params]


FORGOTTEN = {
    "zero_grad": lambda optimizer, params: optimizer.zero_grad(),
    "zero_grad, zeros": lambda optimizer, params: optimizer.zero_grad(set_to_none=False),
    "others": lambda optimizer, params: [setattr(p, "grad", None) for p in params],
    "the last call counts": lambda optimizer, params: optimizer.clip_grad_norm_(1e9),
}


@pytest.mark.parametrize("way", FORGOTTEN)
def test_clip_of_gradients_that_are_gone_is_forgotten(pair, way):
    (ours, theirs), (optimizer, plain) = pair
    set_grads(ours, 0)
    optimizer.clip_grad_norm_(1e-3)
    FORGOTTEN[way](optimizer, ours)
    if step := int(way != "the last call counts"):
        set_grads(ours, step)
    set_grads(theirs, step)
    optimizer.step(), plain.step()
    assert_same(ours, theirs)


CHANGED = {
    "written to": lambda first, last: first.grad.add_(1.0),
    "one is gone": lambda first, last: setattr(first, "grad", None),
    "one is new": lambda first, last: setattr(first, "grad", first.grad.clone()),
    "more": lambda first, last: setattr(last, "grad", torch.ones_like(last)),
}


@pytest.mark.parametrize("change", CHANGED)
def test_step_after_gradients_changed_since_clip_is_refused_and_changes_nothing(pair, change):
    (ours, theirs), (optimizer, plain) = pair
    set_grads(ours, 0)
    ours[-1].grad = None
    optimizer.clip_grad_norm_(1e-3)
    CHANGED[change](ours[0], ours[-1])
    before = [p.detach().clone() for p in ours]
    with pytest.raises(RuntimeError, match="changed since clip_grad_norm_"):
        optimizer.step()
    assert_same(before, [p.detach() for p in ours])
    set_grads(ours, 1)
    set_grads(theirs, 1)
    optimizer.step(), plain.step()
    assert_same(ours, theirs)


def test_clip_non_finite_norm_is_an_error_if_asked_for(pair):
    (ours, _), (optimizer, _) = pair
    set_grads(ours, 0)
    ours[0].grad.fill_(torch.inf)
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    before = [p.detach().clone() for p in ours]
    optimizer.clip_grad_norm_(1.0)  # the factor is 0, and infinity times 0 is NaN
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert_same(before[0], ours[0].detach())


def test_clip_with_steps_in_the_backward_is_refused():
    model = torch.nn.Linear(64, 64)
    optimizer = Adam8bitBlockwise(model.parameters())
    optimizer.step_in_backward(model)
    with pytest.raises(RuntimeError, match="clip_grad_norm_: got steps in the backward"):
        optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="scale_grads: got steps in the backward"):
        optimizer.scale_grads(0.5)


@pytest.mark.parametrize(
    "copy_of", [torch.empty(3).bfloat16(), torch.empty(64, 64), torch.empty(128, 64).half()[::2]]
)
def test_step_with_a_copy_that_cannot_be_written_is_refused_and_changes_nothing(copy_of):
    p = torch.nn.Parameter(torch.ones(64, 64))
    p.grad = torch.ones(64, 64)
    optimizer = Adam8bitBlockwise([p])
    optimizer.copies[p] = copy_of
    with pytest.raises(ValueError, match="copy"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(64, 64))
