# SPDX-License-Identifier: Apache-2.0
"""Every DeepSpeed config in configs/ runs as it stands.

To run one: `pytest tests/optimizer/test_recipes.py -m "" -k zero3_nvme`.
"""

import contextlib

import deepspeed
import pytest
import torch
from places import ROOT
from ranks import build_ops
from shared_memory import leave_out_shared_memory

import zero8

# A first run also builds DeepSpeed's ops.
pytestmark = pytest.mark.timeout(1800)

FOLDER = ROOT / "configs"
FILES = sorted(path.name for path in FOLDER.glob("*.json"))
STEPS = 4
"""The recipes warm up from a learning rate of 0: the first two steps change no weight."""


def steps_of(path, folder):
    """Train with the recipe at `path`, unchanged, in `folder`; return what came of it."""
    leave_out_shared_memory()  # without LOCAL_SIZE it would not be called
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 64))
    with contextlib.chdir(folder):  # zero3_nvme.json has a folder below this one
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
    return {
        "losses": losses,
        "state bytes": engine.basic_optimizer.memory_report().state_bytes_per_param(bits=8),
        "schedule": scheduler.total_num_steps,
    }


@pytest.mark.parametrize("name", FILES)
def test_recipe_steps_under_plain_deepspeed_as_it_stands(tmp_path, standing_ranks, name):
    build_ops()
    # One process for all recipes: starting one takes longer than its steps.
    (got,) = standing_ranks(1).run(steps_of, path=str(FOLDER / name), folder=str(tmp_path))
    assert got["losses"][1] == got["losses"][2] > got["losses"][3] > 0
    assert got["state bytes"] < 2.1
    assert got["schedule"] == 400
