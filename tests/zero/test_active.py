# SPDX-License-Identifier: Apache-2.0
"""Nobody trains with another optimizer than they asked for without being told.

The ranks import DeepSpeed late: it is imported at the top of no module here.
"""

import os
import sys
import warnings

import pytest
import torch
from log_lines import warned
from ranks import error_of, run_ranks

import zero8

SETTING = '"zero_force_ds_cpu_optimizer": false'
BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "steps_per_print": 1000000,
}
UNFORCED = {"zero_force_ds_cpu_optimizer": False}
NO_ZERO = {"zero_optimization": {}}
OURS = {"optimizer": {"type": "Adam8bitBlockwise", "params": {"lr": 1e-2}}}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}


def model():
    return torch.nn.Linear(64, 70)


def with_one(optimizer_class):
    """Return a model with an optimizer object."""
    made = model()
    return made, optimizer_class(made.parameters(), lr=1e-2)


def with_ours():
    return with_one(zero8.Adam8bitBlockwise)


def refused():
    """Return a model for which ours could not be made."""
    made = model()
    groups = [{"params": [made.weight]}, {"params": [made.bias], "lr": -1.0}]
    assert error_of(zero8.Adam8bitBlockwise, groups)[0] == "ValueError"
    return made


def replaced_as_by_accelerate():
    """Return what Accelerate's `prepare` gives DeepSpeed under offload."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made, optimizer = with_ours()
    return made, DeepSpeedCPUAdam(optimizer.param_groups)


def stepped_alone():
    made, optimizer = with_ours()
    made(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    return made


def try_everything():
    """Make engines in all the ways in which they get, or do not get, our optimizer."""
    early, result = with_ours(), {"deepspeed is late": "deepspeed" not in sys.modules}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        import deepspeed

    from shared_memory import leave_out_shared_memory

    leave_out_shared_memory()

    def engine_of(ds_config, model, optimizer=None):
        params, ds_config = model.parameters(), BASE | ds_config
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=params, optimizer=optimizer, config=ds_config
        )
        return engine

    def stepped(engine):
        loss = engine(torch.ones(4, 64)).square().mean()
        engine.backward(loss)
        engine.step()
        return zero8.assert_active(engine)

    def note(name, function, *args):
        result[name] = error_of(function, *args)

    note("object, forced", engine_of, {}, *with_ours())
    note("early object", stepped, engine_of(UNFORCED, *early))
    good, other, kept = engine_of(OURS, model()), engine_of(ADAMW, model()), with_ours()
    untested = UNFORCED | {"zero_allow_untested_optimizer": True}
    note("config", stepped, good)
    for name, engine in {
        "other type": other,
        "other object": engine_of(untested, *with_one(torch.optim.SGD)),
        "one rank": other if os.environ["RANK"] == "1" else good,
        "no optimizer": engine_of(NO_ZERO, model()),
        "no engine": model(),
    }.items():
        note(name, zero8.assert_active, engine)
    note("dropped", engine_of, ADAMW, with_ours()[0])
    note("kept", engine_of, ADAMW, kept[0])
    note("replaced", engine_of, {}, *replaced_as_by_accelerate())
    note("refused", engine_of, ADAMW, refused())
    note("not made", engine_of, NO_ZERO, kept[0])
    note("stepped", engine_of, ADAMW, stepped_alone())
    note("taken, then another", engine_of, ADAMW, early[0])
    with warned() as result["said"]:
        note("ours twice", stepped, engine_of(OURS, with_ours()[0]))
    return result


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("active")
    return run_ranks(try_everything, 2, folder, timeout_s=400, imports="torch._dynamo")


TYPE = '"type": "Adam8bitBlockwise"'
DROPPED = ["would step with AdamW, not with the Adam8bitBlockwise that was made for", TYPE]
# What a way to get an optimizer raises: nothing, or what is in its message.
FINE = ("early object", "config", "ours twice", "not made", "refused", "stepped")
WAYS = dict.fromkeys((*FINE, "taken, then another")) | {
    "object, forced": [SETTING],  # in DeepSpeed's own words
    "other type": ["steps with AdamW, not", TYPE],
    "other object": ["steps with SGD, not", "make no optimizer object", SETTING],
    "one rank": ["steps with AdamW, not", "(ranks [1] of 2)"],
    "no optimizer": ["steps with no optimizer, not", TYPE],
    "no engine": ["got a Linear, expected a DeepSpeed engine"],
    "dropped": DROPPED,
    "kept": DROPPED,
    # As Accelerate's `prepare` does under offload: it replaces the object that it is given.
    "replaced": ["would step with DeepSpeedCPUAdam, not with the Adam8bitBlockwise", SETTING],
}


@pytest.mark.parametrize("name", WAYS)
def test_engine_steps_with_ours_or_raises_alike_on_all_ranks(ranks, name):
    assert ranks[0][name] == ranks[1][name]
    if WAYS[name] is None:
        assert ranks[0][name] is None
    else:
        assert all(part in ranks[0][name][1] for part in WAYS[name]), ranks[0][name]


def test_engine_that_makes_ours_from_its_config_says_that_the_object_is_not_used(ranks):
    for rank in ranks:
        assert rank["deepspeed is late"] is True  # later than the object that is early
        assert any("that it made from its config" in message for message in rank["said"])
