# SPDX-License-Identifier: Apache-2.0
"""Steps in the backward: the bits of steps after it, and what cannot be had with them."""

import os
import time
import weakref

import pytest
import torch
from nests import difference
from torch import nn
from torch.nn.utils import clip_grad_norm_

from zero8 import Adam8bitBlockwise
from zero8.optimizer import in_backward as in_backward_module


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(128, 128, dtype=dtype) for _ in range(4)]
    layers[2].weight = layers[1].weight  # tied: its gradient comes once, when it is whole
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 128, generator=generator)
    return model(inputs.to(next(model.parameters()).dtype)).float().square().mean()


def train(model, optimizer, steps: int, start: int = 0, scheduler=None) -> None:
    for step in range(start, start + steps):
        loss_of(model, step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def after_backward(dtype: torch.dtype = torch.float32):
    model = model_of(dtype)
    keywords = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return model, Adam8bitBlockwise(model.named_parameters(), **keywords)


def in_backward(dtype: torch.dtype = torch.float32):
    model, optimizer = after_backward(dtype)
    return model, optimizer, optimizer.step_in_backward(model)


def assert_same(*runs) -> None:
    held = [{n: (p, of.state[p]) for n, p in model.named_parameters()} for model, of in runs]
    assert difference(*held) == ""


STEP_IN_A_FORK = """
import os, sys, torch, zero8
torch.set_num_threads(1)
model = torch.nn.Linear(100, 100)
optimizer = zero8.Adam8bitBlockwise(model.named_parameters(), lr=1e-3)
optimizer.step_in_backward(model)

def train():
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()

train()
child = os.fork()
train()
torch.save(optimizer.state_dict(), sys.argv[2 if child else 1])
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_in_backward_in_a_fork_has_the_bits_of_its_parent(forks, tmp_path):
    """The thread that steps is not there; to wait for it would have no end."""
    paths = [str(tmp_path / name) for name in ("child", "parent")]
    done = forks.run(STEP_IN_A_FORK, *paths, seconds=60)
    assert done.returncode == 0, done.stderr
    child, parent = (torch.load(path)["state"] for path in paths)
    assert difference(child, parent) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_backward_has_the_bits_of_steps_after_it(dtype):
    """Under a schedule, and with hooks of steps, which run once an iteration."""
    counts = []
    runs = in_backward(dtype)[:2], after_backward(dtype)
    for model, optimizer in runs:
        optimizer.register_step_post_hook(lambda *_: counts.append(1))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
        train(model, optimizer, 6, scheduler=scheduler)
    assert len(counts) == 12
    assert_same(*runs)


def test_in_backward_gradients_are_freed_while_it_goes_on_and_few_wait_at_one_time(monkeypatch):
    """At most two of the four of 64 KiB, and the small ones."""
    monkeypatch.setattr(in_backward_module, "MOST_WAITING_BYTES", 2 * 128 * 128 * 4 + 4096)
    model, optimizer, handle = in_backward()
    grads, alive, waiting = [], [], []
    step_one = handle._take_step

    def slowly(p, grad):
        time.sleep(0.02)
        grads.append(weakref.ref(grad))
        alive.append(sum(ref() is not None for ref in grads))
        waiting.append(handle._waiting_bytes)
        step_one(p, grad)

    handle._take_step = slowly
    train(model, optimizer, 1)
    assert len(grads) == 7 and all(ref() is None for ref in grads)
    assert alive[-1] < len(grads)
    assert 0 < max(waiting) <= in_backward_module.MOST_WAITING_BYTES
    assert handle._waiting_bytes == 0


def clip(model, optimizer):
    loss_of(model, 0).backward()
    clip_grad_norm_(model.parameters(), 1.0)


def accumulate(model, optimizer):
    loss_of(model, 0).backward()
    # It waits for the steps.  A forward beside them saves weights that they change, and torch then
    # raises an error of its own before the gradient is looked at.
    optimizer.state_dict()
    loss_of(model, 1).backward()


def scale(model, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)


def zero_in_place(model, optimizer):
    loss_of(model, 0).backward()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("use", [clip, accumulate, scale, zero_in_place])
def test_in_backward_use_of_a_gradient_afterwards_raises_with_the_reason(use):
    model, optimizer, _ = in_backward()
    with pytest.raises(RuntimeError, match="step_in_backward has stepped with this gradient"):
        use(model, optimizer)


class Buckets(nn.Sequential):
    """Stands for DistributedDataParallel."""


def flattened():
    model = nn.Linear(64, 64)
    model.weight._fsdp_flattened = True
    return model, model


def sharing():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight.data = model[0].weight.data
    return model, model


REFUSED = {
    "buckets": lambda: [Buckets(nn.Linear(64, 64))] * 2,
    "FSDP1": flattened,
    "2 parameters that are not the model's": lambda: (nn.Linear(64, 64), nn.Linear(64, 64)),
    "share memory": sharing,
}


@pytest.mark.parametrize("message", REFUSED)
def test_in_backward_of_gradients_that_are_not_final_is_refused(message, monkeypatch):
    monkeypatch.setattr(in_backward_module, "DistributedDataParallel", Buckets)
    stepped, model = REFUSED[message]()
    with pytest.raises(ValueError, match=message):
        Adam8bitBlockwise(stepped.parameters()).step_in_backward(model)


def test_in_backward_removed_steps_as_usual_and_clips():
    model, optimizer, handle = in_backward()
    train(model, optimizer, 2)
    handle.remove()
    other_model, other = after_backward()
    train(other_model, other, 2)
    for each, its in ((model, optimizer), (other_model, other)):
        loss_of(each, 2).backward()
        clip_grad_norm_(each.parameters(), 1e-3)
        its.step()
        its.zero_grad()
    assert_same((model, optimizer), (other_model, other))


def test_in_backward_groups_that_change_and_a_load_are_followed():
    """New and changed groups from the next backward on; a loaded rate from the next step on."""
    runs = in_backward()[:2], after_backward()
    for model, optimizer in runs:
        train(model, optimizer, 1)
        torch.manual_seed(1)
        model.append(nn.Linear(128, 128))
        optimizer.add_param_group({"params": list(model[4].named_parameters("4")), "lr": 0.05})
        train(model, optimizer, 2, start=1)
        first, second = (group["params"] for group in optimizer.param_groups)
        second.insert(0, first.pop(0))
        train(model, optimizer, 1, start=3)
        saved = optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 0.002
        optimizer.load_state_dict(saved)
        train(model, optimizer, 2, start=4)
    assert_same(*runs)


def test_in_backward_error_of_a_step_raises_at_step_and_the_next_goes_on():
    model, optimizer, _ = in_backward()
    train(model, optimizer, 1)
    optimizer.state[model[0].weight]["format"] = torch.zeros(3)
    loss_of(model, 1).backward()
    with pytest.raises(ValueError, match="format"):
        optimizer.step()
    optimizer.state[model[0].weight] = {}
    train(model, optimizer, 1, start=2)
