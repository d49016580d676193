# SPDX-License-Identifier: Apache-2.0
"""What test_recipes.py runs on a rank: a recipe as any script of DeepSpeed's would take it."""

import os

import deepspeed
import torch
from shared_memory import leave_out_shared_memory

import zero8

STEPS = 4
"""The recipes warm up from a learning rate of 0: the first two steps change no weight."""


def steps_of(path, folder):
    """Train with the recipe at `path`, unchanged, in `folder`; return what came of it."""
    leave_out_shared_memory()  # without LOCAL_SIZE it would not be called
    here = os.getcwd()
    os.chdir(folder)  # zero3_nvme.json swaps to a folder below this one
    try:
        return _steps_of(path)
    finally:
        os.chdir(here)


def _steps_of(path):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 64))
    before = [p.detach().clone() for p in model.parameters()]
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=path
    )
    losses = []
    for _ in range(STEPS):
        x = torch.ones(8, 512, dtype=next(model.parameters()).dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    zero8.assert_active(engine)
    moved = []
    for p, old in zip(model.parameters(), before, strict=True):
        if hasattr(p, "ds_id"):
            with deepspeed.zero.GatheredParameters([p]):
                new = p.detach().clone()
        else:
            new = p.detach()
        moved.append(not torch.equal(new, old.to(new.dtype)))
    return {
        "losses": losses,
        "moved": moved,
        "state bytes": engine.basic_optimizer.memory_report().state_bytes_per_param(bits=8),
        "schedule": scheduler.total_num_steps,
        "swapped": [name for _, _, names in os.walk("runs") for name in names],
    }
