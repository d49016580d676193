# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of ZeRO 1 and 2, which are read by position, into parameters in another order."""

import pytest
import torch
from ranks import error_of
from zero_worker import Bag, base_optimizer, config, make_engine, take_step

STAGES = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero1 bf16": {"stage": 1, "dtype": {}},
}


def save_fp32(folder: str, layout: str) -> None:
    """Save a checkpoint of torch's AdamW after a step."""
    ds_config = config(offload=None, **STAGES[layout])
    del ds_config["optimizer"]
    model = Bag()
    engine = make_engine(
        ds_config | {"zero_allow_untested_optimizer": True},
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    )
    take_step(engine, 0)
    engine.save_checkpoint(folder)


def load(folder: str, layout: str) -> dict:
    """Return what comes of loading it into parameters in the same order, and in another."""
    found = {}
    for name, step in (("same", 1), ("reversed", -1)):
        model = Bag()
        groups = list(model.parameters())[::step]
        engine = make_engine(config(offload=None, **STAGES[layout]), model, groups)
        found[name] = error_of(engine.load_checkpoint, folder)
        found[f"{name}, steps"] = {int(s["step"]) for s in base_optimizer(engine).state.values()}
    return found


@pytest.mark.parametrize("layout", STAGES)
def test_zero_checkpoint_of_another_order_is_refused_on_all_ranks(layout, standing_ranks, tmp_path):
    arguments = {"folder": str(tmp_path), "layout": layout}
    ranks = standing_ranks(2)
    ranks.run(save_fp32, **arguments)
    for found in ranks.run(load, **arguments):
        assert found["same"] is None and found["same, steps"] == {1}
        kind, text = found["reversed"]
        assert kind == "ValueError"
        assert "the checkpoint's parameters are in another order" in text
        assert "group 0, elements " in text and 1 not in found["reversed, steps"]
