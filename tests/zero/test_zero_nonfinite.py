# SPDX-License-Identifier: Apache-2.0
"""A NaN that reaches one rank stops the blocks it touches, and neither the rank nor the others."""

import math
import os

import pytest
import torch
from log_lines import warned
from nests import assert_same
from ranks import on_ranks
from zero_shards import put_together
from zero_worker import MOMENTS, Bag, base_optimizer, config, held, make_engine, take_step

from zero8.environment.ranks import gathered

RANK = int(os.environ.get("RANK", 0))
# bf16 without DeepSpeed's check: the step is taken.
LAYOUTS = {
    "from the loss": config(stage=2, dtype={"check_grad_overflow": False}),
    "in the flat gradient": config(stage=2, fp32_params=["thin"]),
    "in ZeRO-3's flat gradient": config(stage=3, fp32_params=["thin"]),
}


def poison_flat_gradient(optimizer, args, kwargs):
    """Put NaN and infinities into the gradients of two parameters, on rank 1 only."""
    if RANK != 1:
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            for piece in optimizer.state[p]["exp_avg"].store.table.pieces:
                here = p.grad[piece.start : piece.start + piece.numel]
                if piece.name == "long":
                    here[0] = math.nan
                if piece.name == "thin":
                    here[-2:] = torch.tensor([math.inf, -math.inf])


def places(name, rank):
    """Return {parameter: elements of the rank's part of it} that the NaN must have stopped.

    "wide": the second block of the last row of 300.  "long": ten blocks to a row of 2500; ZeRO-2
    has all of it on rank 1, ZeRO-3 the second row; either way a row's first block, of row 0 or 1.
    "thin": float32 moments, in runs of 256 elements; the NaNs are in the last.
    """
    if name == "from the loss":
        return {"wide": range(5956, 6000)} if rank == 0 else {}
    if rank == 0:
        return {}
    first = 2500 if "ZeRO-3" in name else 0
    return {"long": range(first, first + 256), "thin": range(5888, 6000)}


def assert_stopped(stopped, before, clean, poisoned, keys=("weights", *MOMENTS)):
    """Check that these elements stayed as they were before, and that all others are clean."""
    before, clean, poisoned = (put_together(gathered(x), 256) for x in (before, clean, poisoned))
    for parameter, entry in poisoned.items():
        expected = clean[parameter]
        for key in keys:
            for at in stopped.get(parameter, ()):
                expected[key][at] = before[parameter][key][at]
            assert torch.equal(entry[key], expected[key]), (parameter, key)


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(2)
def test_nan_on_one_rank_leaves_its_blocks_and_steps_all_others(name):
    """It is counted and logged on that rank, and raises on all when asked; training goes on."""
    clean, poisoned = (make_engine(LAYOUTS[name], Bag()) for _ in range(2))
    optimizer = base_optimizer(poisoned)
    for step in range(2):
        take_step(clean, step)
        take_step(poisoned, step)
    before = held(poisoned)
    take_step(clean, 2)
    with warned() as messages:
        if "flat" in name:
            hook = optimizer.register_step_pre_hook(poison_flat_gradient)
            take_step(poisoned, 2)
            hook.remove()
        else:
            take_step(poisoned, 2, "wide" if RANK == 1 else None)
    assert_stopped(places(name, 0) | places(name, 1), before, held(clean), held(poisoned))
    messages, expected = [text for text in messages if "blocks" in text], places(name, RANK)
    assert optimizer.nonfinite_blocks == len(expected) == len(messages)
    for parameter in expected:
        assert any(f"{parameter}: 1 blocks" in text for text in messages)
    base_optimizer(clean).check_finite()
    take_step(poisoned, 3)
    total = sum(gathered(len(expected)))
    with pytest.raises(FloatingPointError, match=f"^{total} blocks met a non-finite gradient"):
        optimizer.check_finite()
    for state in held(poisoned)["states"]:
        assert state["step"] == 4 and state["master"].isfinite().all()


@pytest.mark.parametrize("name", ["in the flat gradient", "in ZeRO-3's flat gradient"])
@on_ranks(2)
def test_infinity_assigned_on_one_rank_leaves_its_block_and_raises_on_all_when_asked(name):
    """To a first moment.  A rank that raised alone would leave the others waiting for it."""
    found = []
    for poisoned in ("", "long"):
        engine = make_engine(LAYOUTS[name], Bag())
        take_step(engine, 0)
        before, optimizer = held(engine), base_optimizer(engine)
        for state in optimizer.state.values():
            values = state["exp_avg"].dense()
            for piece in state["exp_avg"].store.table.pieces:
                if (piece.name, RANK) == (poisoned, 1):
                    values[piece.start] = math.inf
            state["exp_avg"] = values
        take_step(engine, 1)
        found.append(held(engine))
    assert_stopped({"long": places(name, 1)["long"]}, before, *found, keys=["weights"])
    assert optimizer.nonfinite_blocks == RANK
    with pytest.raises(FloatingPointError, match="^1 blocks met a non-finite gradient"):
        optimizer.check_finite()


@on_ranks(2)
def test_step_that_deepspeed_skips_for_a_nan_changes_and_counts_nothing():
    engine = make_engine(config(stage=2), Bag())
    take_step(engine, 0)
    before = held(engine)
    take_step(engine, 1, "wide" if RANK == 1 else None)
    assert_same(held(engine), before)
    base_optimizer(engine).check_finite()
    take_step(engine, 2)
    assert {state["step"] for state in held(engine)["states"]} == {2}
