# SPDX-License-Identifier: Apache-2.0
"""What runs on the ranks of test_active.py; deepspeed must not be imported at the top."""

import os
import sys
import warnings

import torch
from log_lines import warned
from ranks import error_of

import zero8

UNFORCED = {"zero_force_ds_cpu_optimizer": False}
UNTESTED = {"zero_allow_untested_optimizer": True}
NO_ZERO = {"zero_optimization": {}}
OURS = {"optimizer": {"type": "Adam8bitBlockwise", "params": {"lr": 1e-2}}}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}


def model():
    return torch.nn.Linear(64, 70)


def with_ours():
    made = model()
    return made, zero8.Adam8bitBlockwise(made.parameters(), lr=1e-2)


def with_sgd():
    made = model()
    return made, torch.optim.SGD(made.parameters(), lr=1e-2)


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


def try_everything(base):
    """Make engines in all the ways in which they get, or do not get, our optimizer."""
    early, result = with_ours(), {"deepspeed is late": "deepspeed" not in sys.modules}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        import deepspeed

    from shared_memory import leave_out_shared_memory

    leave_out_shared_memory()

    def engine_of(ds_config, model, optimizer=None):
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=optimizer,
            config=base | ds_config,
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
    note("config", stepped, good)
    for name, engine in {
        "other type": other,
        "other object": engine_of(UNFORCED | UNTESTED, *with_sgd()),
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
