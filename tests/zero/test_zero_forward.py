# SPDX-License-Identifier: Apache-2.0
"""Steps behind the next forward have the bits of steps in the call, whatever comes in between.

The thread is as late as it can be (`Late`): what does not wait finds old weights and states.
"""

import copy
import gc
import os
import signal
from contextlib import contextmanager

import deepspeed
import pytest
import torch
import zero_worker
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_local_grad,
)
from nests import assert_same
from ranks import error_of
from torch.utils.checkpoint import checkpoint
from zero_worker import Bag, base_optimizer, config, make_engine, pattern, take_step

from zero8.environment import worker
from zero8.environment.worker import Worker

STEPS = 5
ON = {"zero8": {"step_in_forward": True}}
HALF = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
MASTERS = {"bf16_master_weights_and_grads": True}
WARM_UP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}
RAGGED = {
    "sub_group_size": 2000,
    "stage3_param_persistence_threshold": 300,
    "reduce_bucket_size": 10**5,
}
"""Sub-groups of one to several parameters, some of which DeepSpeed keeps gathered."""


class Late(Worker):
    """A thread that begins a unit of work when somebody waits for that one, or a later one."""

    def __init__(self, name):
        super().__init__(name)
        self.left, self.begun_late = {}, 0

    def do(self, unit, work):
        self.left[unit] = work

    def wait(self, units):
        units = list(units)
        while not self.left.keys().isdisjoint(units):
            unit = next(iter(self.left))
            self.begun_late += 1
            super().do(unit, self.left.pop(unit))
        super().wait(units)

    def wait_all(self):
        self.wait([*self.left, *self._pending])


@contextmanager
def late():
    """Have engines that are made in the block step as late as they can."""
    worker.Worker = Late
    try:
        yield
    finally:
        worker.Worker = Worker


def left_of(engine):
    """Return the sub-groups whose steps have not begun; none of steps in the call."""
    worker = getattr(base_optimizer(engine).beside, "worker", None)
    return [] if worker is None else [unit for unit in worker.left if unit >= 0]


def held(engine):
    """Return copies of parameters and states after all steps."""
    assert base_optimizer(engine).states  # waits
    return zero_worker.held(engine)


def runs_of(ds_config, model, run, *args, more=ON):
    """Return what steps in the call, and steps as late as they can be, give and leave behind."""
    found = []
    for settings in (ds_config, ds_config | more):
        torch.manual_seed(7)
        with late():
            engine = make_engine(settings, model())
        found.append((run(engine, *args), held(engine)))
        assert not left_of(engine)
    assert base_optimizer(engine).beside.worker.begun_late > 1
    return found


def check(rows):
    """Check all rows, in one process."""
    for name, row in rows.items():
        try:
            assert_same(*runs_of(*row))
        except AssertionError as error:
            raise AssertionError(name) from error
        # Each engine reserves 1 GB, and Linux refuses to fork what could need more than there is.
        gc.collect()


# --- Layouts -------------------------------------------------------------------------------------


class Layers(torch.nn.Module):
    """Layers in any order and number, recomputed in the backward; tied, unused and frozen ones."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(5))
        self.layers[4].weight = self.layers[0].weight
        self.layers[3].bias.requires_grad_(False)

    def forward(self, step, order=(0, 1, 2, 3, 4)):
        x = pattern(f"x {step} {os.environ['RANK']}", (4, 64)).to(self.layers[0].weight.dtype)
        for number in order:
            x = torch.tanh(checkpoint(self.layers[number], x, use_reentrant=False))
        return x.float().square().sum()


class Overflowing(Bag):
    """A Bag whose gradients overflow in the step 2."""

    def forward(self, step):
        return super().forward(step) * (torch.inf if step == 2 else 1.0)


def steps(engine, first=0, number=STEPS):
    each = range(engine.gradient_accumulation_steps())
    return [take_step(engine, step) for step in range(first, first + number) for _ in each]


def orders(engine):
    """Use the layers in other orders, twice, or not at all, and evaluate in between."""
    losses = []
    for step, order in enumerate(((0, 1, 2, 3, 4), (3, 2, 1, 0), (1, 1, 2), (4, 0), (2, 3, 1))):
        losses.append(take_step(engine, step, order))
        engine.eval()
        with torch.no_grad():
            losses.append(engine(step, (3, 1)).item())
        engine.train()
    return losses


def layout(dtype=None, zero=None, clip=0.5, more=None, **options):
    made = config(3, dtype=dtype, zero=RAGGED | (zero or {}), **options)
    return made | {"gradient_clipping": clip} | (more or {})


BF16 = layout({})
KEPT = "stage3_param_persistence_threshold"
LAYOUTS = {
    "clipped": (BF16, Bag, steps),
    "not clipped": (layout({}, clip=0.0), Bag, steps),
    "one sub-group": (layout({}, {"sub_group_size": 10**9}), Bag, steps),
    "nothing kept": (layout({}, {KEPT: 0}), Layers, steps),
    "all kept": (layout({}, {KEPT: 10**6, "stage3_prefetch_bucket_size": 0}), Layers, steps),
    "overflow": (layout(more=HALF), Overflowing, steps),
    "fp32": (layout(), Layers, steps),
    "bf16 masters": (layout(MASTERS, {"offload_param": {"device": "cpu"}}), Bag, steps),
    "24-bit masters": (layout(MASTERS, weight_correction_bits=8), Layers, steps),
    "accumulated": (layout({}, more={"gradient_accumulation_steps": 2}), Layers, steps),
    "orders": (BF16, Layers, orders),
    "scheduled Lion": (layout({}, more=WARM_UP, optimizer="Lion8bitBlockwise"), Layers, steps),
}


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_step_in_forward_has_the_bits_of_steps_in_the_call(ranks, standing_ranks):
    standing_ranks(ranks).run(check, rows=LAYOUTS)


# --- Events --------------------------------------------------------------------------------------


def save_and_load(engine, folder):
    engine.save_checkpoint(folder)
    before = held(engine)
    steps(engine, 10, 2)
    engine.load_checkpoint(folder)
    return before


def read(engine, _):
    p = engine.module.conv
    found = [safe_get_full_fp32_param(p), safe_get_full_optimizer_state(p, "exp_avg").float()]
    return [*found, safe_get_full_grad(engine.module.wide)]


def report(engine, _):
    copied = copy.deepcopy(base_optimizer(engine))
    return [state["step"] for state in copied.state.values()], copied.memory_report().to_dicts()


def write(engine, _):
    safe_set_full_fp32_param(engine.module.conv, torch.full(Bag.SHAPES["conv"], 0.5))
    with deepspeed.zero.GatheredParameters([engine.module.wide], modifier_rank=0):
        engine.module.wide.data.fill_(0.25)


def write_gradients(engine, _):
    """Write one that the backward replaces, and one that the step takes."""
    p = engine.module.conv
    safe_set_local_grad(p, torch.full((p.ds_tensor.numel(),), 0.5))
    engine.backward(engine(7))
    safe_set_full_grad(engine.module.wide, torch.full(Bag.SHAPES["wide"], 1 / 3))
    engine.step()


def change_settings(engine, _):
    """As schedulers and scripts do after a step, which must not notice."""
    for group in base_optimizer(engine).param_groups:
        group.update(lr=0.5, betas=(0.1, 0.2), weight_decay=0.3)
        assert group["params"] == []
    engine.optimizer.clip_grad = 7.0


def offload(engine, _):
    kinds = OffloadStateTypeEnum
    engine.offload_states(include=[kinds.hp_params, kinds.optim_states])
    engine.reload_states()


def step_again(engine, _):
    engine.step()


def raise_in_the_forward(engine, _):
    return error_of(engine, "no step")


def fork(engine, _):
    """A child of the process finds states that have stepped."""
    if not (child := os.fork()):
        os._exit(len(left_of(engine)))
    assert os.waitpid(child, 0)[1] == 0


def be_interrupted(engine, _):
    """A signal arrives in a step; its handler reads states."""
    found, step, zero = [], engine.optimizer.step, engine.optimizer
    before = signal.signal(signal.SIGUSR1, lambda *_: found.extend(read(engine, _)))
    zero.step = lambda: (os.kill(os.getpid(), signal.SIGUSR1), step())
    take_step(engine, 20)
    del zero.step
    signal.signal(signal.SIGUSR1, before)
    return found


EVENTS = (save_and_load, read, report, write, write_gradients, change_settings, offload, step_again)
EVENTS += (raise_in_the_forward, fork, be_interrupted)


def happen(engine, event, folder):
    """Train; something happens when no sub-group has stepped; train on."""
    steps(engine, 0, 3)
    assert (
        base_optimizer(engine).beside is None
        or len(left_of(engine)) == len(engine.optimizer.fp16_groups) > 3
    )
    return event(engine, folder), steps(engine, 3, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_step_in_forward_is_over_for_whatever_needs_it(ranks, standing_ranks, tmp_path):
    rows = {one.__name__: (BF16, Bag, happen, one, f"{tmp_path}/{one.__name__}") for one in EVENTS}
    standing_ranks(ranks).run(check, rows=rows)


# --- Errors --------------------------------------------------------------------------------------


def go_on(engine, _):
    take_step(engine, 2)


def save(engine, folder):
    engine.save_checkpoint(folder)


def fail(ranks, call, folder):
    """Return the error of a call after the last rank has failed to step, and go on."""
    engine = make_engine(BF16 | ON, Bag())
    take_step(engine, 0)
    optimizer = base_optimizer(engine)
    assert optimizer.states  # waits
    if os.environ["RANK"] == str(ranks - 1):
        optimizer.step_groups = None  # which is not callable
    take_step(engine, 1)
    error = error_of(call, engine, folder)
    vars(optimizer).pop("step_groups", None)
    take_step(engine, 3)
    save(engine, folder)
    return error


@pytest.mark.parametrize("call", [go_on, save])
@pytest.mark.parametrize("ranks", [1, 2])
def test_step_in_forward_that_fails_on_a_rank_raises_on_all(ranks, call, standing_ranks, tmp_path):
    """None of them hangs in a gather; a single rank raises as soon as it needs what has failed."""
    kwargs = {"ranks": ranks, "call": call, "folder": str(tmp_path)}
    *others, (kind, text) = standing_ranks(ranks).run(fail, **kwargs)
    assert kind == "TypeError" and "not callable" in text
    for kind, text in others:
        assert kind == "OSError" and "1 other rank(s) could not take the optimizer's step" in text
