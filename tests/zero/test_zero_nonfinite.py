# SPDX-License-Identifier: Apache-2.0
"""A NaN that reaches one rank stops the blocks it touches, and neither the rank nor the others."""

import math
import os

import pytest
import torch
from log_lines import warned
from nests import difference
from zero_shards import put_together
from zero_worker import MOMENTS, Bag, base_optimizer, config, held, make_engine, take_step

# fp32: DeepSpeed finds the NaN and skips the step.  bf16 without its check: the step is taken.
LAYOUTS = {
    "skipped by DeepSpeed": config(stage=2),
    "from the loss": config(stage=2, dtype={"check_grad_overflow": False}),
    "in the flat gradient": config(stage=2, fp32_params=["thin"]),
    "in ZeRO-3's flat gradient": config(stage=3, fp32_params=["thin"]),
}


def poison_flat_gradient(optimizer, args, kwargs):
    """Put NaN and infinities into the gradients of two parameters, on rank 1 only."""
    if os.environ["RANK"] != "1":
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            for piece in optimizer.state[p]["exp_avg"].store.table.pieces:
                here = p.grad[piece.start : piece.start + piece.numel]
                if piece.name == "long":
                    here[0] = math.nan
                if piece.name == "thin":
                    here[-2:] = torch.tensor([math.inf, -math.inf])


def step_poisoned(layouts):
    """Take two steps, one with a NaN on rank 1, one without; return what is held in between."""
    result = {}
    for name, ds_config in layouts.items():
        clean, poisoned = make_engine(ds_config, Bag()), make_engine(ds_config, Bag())
        base = base_optimizer(poisoned)
        for step in range(2):
            take_step(clean, step)
            take_step(poisoned, step)
        before = held(poisoned)
        take_step(clean, 2)
        with warned() as messages:
            if "flat" in name:
                hook = base.register_step_pre_hook(poison_flat_gradient)
                take_step(poisoned, 2)
                hook.remove()
            else:
                take_step(poisoned, 2, "wide" if os.environ["RANK"] == "1" else None)
        messages = [text for text in messages if "blocks" in text]
        result[name] = {
            "before": before,
            "clean": held(clean),
            "poisoned": held(poisoned),
            "counted": base.nonfinite_blocks,
            "messages": messages,
            "clean check": checked(base_optimizer(clean)),
        }
        take_step(poisoned, 3)
        result[name] |= {"after": held(poisoned), "check": checked(base)}
    return result


def step_assigned(ds_config):
    """Take a step after first moments have been assigned, one of them infinite on rank 1."""
    result = {}
    for name in ("clean", "poisoned"):
        engine = make_engine(ds_config, Bag())
        take_step(engine, 0)
        result["before"] = held(engine)
        optimizer = base_optimizer(engine)
        for state in optimizer.state.values():
            values = state["exp_avg"].dense()
            for piece in state["exp_avg"].store.table.pieces:
                if (name, piece.name, os.environ["RANK"]) == ("poisoned", "long", "1"):
                    values[piece.start] = math.inf
            state["exp_avg"] = values
        take_step(engine, 1)
        result[name] = held(engine)
    return result | {"counted": optimizer.nonfinite_blocks, "check": checked(optimizer)}


def checked(optimizer):
    try:
        optimizer.check_finite()
    except FloatingPointError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def ranks(standing_ranks):
    return standing_ranks(2).run(step_poisoned, layouts=LAYOUTS)


STEPPED = [name for name in LAYOUTS if "skipped" not in name]


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


def states_in(ranks):
    """Return what all ranks hold before, without and with the NaN, put together."""
    for when in ("before", "clean", "poisoned"):
        yield put_together([result[when] for result in ranks], block_size=256)


def assert_stopped(stopped, before, clean, poisoned, keys=("weights", *MOMENTS)):
    """Check that these elements stayed as they were before, and that all others are clean."""
    for parameter, entry in poisoned.items():
        expected = clean[parameter]
        for key in keys:
            for at in stopped.get(parameter, ()):
                expected[key][at] = before[parameter][key][at]
            assert torch.equal(entry[key], expected[key]), (parameter, key)


@pytest.mark.parametrize("name", STEPPED)
def test_nan_on_one_rank_leaves_its_blocks_and_steps_all_others(ranks, name):
    stopped = places(name, 0) | places(name, 1)
    assert_stopped(stopped, *states_in([result[name] for result in ranks]))


@pytest.mark.parametrize("name", STEPPED)
def test_nan_on_one_rank_is_counted_and_logged_there_and_raises_on_all_when_asked(ranks, name):
    total = sum(result[name]["counted"] for result in ranks)
    for rank, result in enumerate(ranks):
        expected = places(name, rank)
        assert result[name]["counted"] == len(expected) == len(result[name]["messages"])
        for parameter in expected:
            assert any(f"{parameter}: 1 blocks" in text for text in result[name]["messages"])
        assert result[name]["check"].startswith(f"{total} blocks met a non-finite gradient")
        assert result[name]["clean check"] is None


@pytest.mark.parametrize("name", ["in the flat gradient", "in ZeRO-3's flat gradient"])
def test_infinity_assigned_on_one_rank_leaves_its_block_and_raises_on_all_when_asked(
    name, standing_ranks
):
    """A rank that raised alone would leave the others waiting in their next collective."""
    every = standing_ranks(2).run(step_assigned, ds_config=LAYOUTS[name])
    stopped = {"long": places(name, 1)["long"]}
    assert_stopped(stopped, *states_in(every), keys=["weights"])
    for rank, result in enumerate(every):
        assert result["counted"] == rank
        assert result["check"].startswith("1 blocks met a non-finite gradient")


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_goes_on_after_a_nan_or_a_step_that_deepspeed_skips(ranks, name):
    is_skipped = "skipped" in name
    for result in (rank[name] for rank in ranks):
        for state in result["after"]["states"]:
            assert state["step"] == (3 if is_skipped else 4)
            assert state["master"].isfinite().all()
        if is_skipped:
            assert difference(result["before"], result["poisoned"]) == ""
            assert (result["counted"], result["check"]) == (0, None)
