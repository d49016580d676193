# SPDX-License-Identifier: Apache-2.0
"""What runs on the ranks of test_active.py; deepspeed must not be imported at the top."""

import logging
import os
import sys
import warnings
from contextlib import contextmanager

import torch
from ranks import error_of

import zero8


def new_optimizer():
    torch.manual_seed(7)
    model = torch.nn.Linear(64, 70)
    return model, zero8.Adam8bitBlockwise(model.parameters(), lr=1e-2)


def try_everything(base):
    """Make engines in all the ways in which they get, or do not get, our optimizer."""
    early, refused = new_optimizer(), new_optimizer()
    result = {"deepspeed is late": "deepspeed" not in sys.modules}
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

    def model():
        return torch.nn.Linear(64, 70)

    unforced = {"zero_force_ds_cpu_optimizer": False}
    ours = {"optimizer": {"type": "Adam8bitBlockwise", "params": {"lr": 1e-2}}}
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
    result["object, forced"] = error_of(engine_of, {}, *refused)
    result["early object"] = error_of(stepped, engine_of(unforced, *early))
    good = engine_of(ours, model())
    result["config"] = error_of(stepped, good)
    other = engine_of(adamw, model())
    result["other type"] = error_of(zero8.assert_active, other)
    net = model()
    given = engine_of(unforced | {"zero_allow_untested_optimizer": True}, net, sgd(net))
    result["other object"] = error_of(zero8.assert_active, given)
    forced = engine_of(
        {"zero_allow_untested_optimizer": True, "zero_optimization": {}}, *given_sgd()
    )
    result["other object, forced"] = error_of(zero8.assert_active, forced)
    kept = new_optimizer()
    result["dropped"] = error_of(engine_of, adamw, new_optimizer()[0])
    result["kept"] = error_of(engine_of, adamw, kept[0])
    result["replaced"] = error_of(engine_of, {}, *replaced_as_by_accelerate(*new_optimizer()))
    result["refused"] = error_of(engine_of, adamw, model_that_was_refused())
    result["not made"] = error_of(engine_of, {"zero_optimization": {"stage": 0}}, kept[0])
    result["stepped"] = error_of(engine_of, adamw, stepped_alone(*new_optimizer()))
    result["taken, then another"] = error_of(engine_of, adamw, early[0])
    with said() as messages:
        result["ours twice"] = error_of(stepped, engine_of(ours, new_optimizer()[0]))
    result["said"] = messages
    on_rank_1 = other if os.environ["RANK"] == "1" else good
    result["one rank"] = error_of(zero8.assert_active, on_rank_1)
    result["no optimizer"] = error_of(
        zero8.assert_active, engine_of({"zero_optimization": {"stage": 0}}, model())
    )
    result["no engine"] = error_of(zero8.assert_active, model())
    good._config.zero_config.offload_optimizer.super_offload = True
    result["other mode"] = error_of(zero8.assert_active, good)
    return result


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def given_sgd():
    model = torch.nn.Linear(64, 70)
    return model, sgd(model)


def model_that_was_refused():
    """Return a model for which ours could not be made."""
    model = torch.nn.Linear(64, 70)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": -1.0}]
    assert error_of(zero8.Adam8bitBlockwise, groups)[0] == "ValueError"
    return model


def replaced_as_by_accelerate(model, optimizer):
    """Return what Accelerate's `prepare` gives DeepSpeed under offload."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return model, DeepSpeedCPUAdam(optimizer.param_groups)


def stepped_alone(model, optimizer):
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    return model


@contextmanager
def said():
    """Collect what zero8 logs."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("zero8").addHandler(handler)
    yield messages
    logging.getLogger("zero8").removeHandler(handler)
