# SPDX-License-Identifier: Apache-2.0
"""Gradients in host memory that have the model's dtype give the bits of float32 ones."""

import copy
import logging
from functools import cache

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_grad,
    safe_set_full_grad,
    safe_set_local_grad,
    safe_update_full_grad_vectorized,
)
from nests import difference
from zero_worker import Bag, base_optimizer, config, held, make_engine, pair, take_step

from zero8.deepspeed import gradients

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CLIP = {"gradient_clipping": 0.5}
GAS = {"gradient_accumulation_steps": 2}
SMALL = {"sub_group_size": 5000}
HALF = {"fp16": {"enabled": True, "initial_scale_power": 8}}
FP32_GRADS = {"data_types": {"grad_accum_dtype": "fp32"}}
# By layout: its config, and the dtype of the gradients.
QUICK = {
    "zero2": (config(2, dtype={}) | CLIP, BF16),
    "zero2, round robin": (config(2, dtype={}, zero={"round_robin_gradients": True}) | CLIP, BF16),
    "zero2, summed in fp32": (config(2, dtype={}) | CLIP | GAS | FP32_GRADS, FP32),
    "zero3": (config(3, dtype={}) | CLIP, BF16),
    "zero3, sub-groups, accumulated": (config(3, dtype={}, zero=SMALL) | CLIP | GAS, BF16),
}
SLOW = {
    "zero1": (config(1, dtype={}) | CLIP, BF16),
    "zero2, without clipping": (config(2, dtype={}), BF16),
    "zero2, accumulated": (config(2, dtype={}) | CLIP | GAS, BF16),
    "zero2, Lion": (config(2, dtype={}, optimizer="Lion8bitBlockwise") | CLIP, BF16),
    "zero2, fp16": (config(2) | CLIP | HALF, FP16),
    "zero2, fp32": (config(2) | CLIP, FP32),
    "zero3, fp16": (config(3) | CLIP | HALF, FP16),
    "zero3, summed in fp32": (config(3, dtype={}) | CLIP | GAS | FP32_GRADS, FP32),
    "zero2, no offload": (config(2, offload=None, dtype={}) | CLIP, None),
}
NAMES = (*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))
THEIRS = config(2, dtype={}, optimizer="AdamW")
COPIED = ("zero2", "zero3", "zero3, sub-groups, accumulated")
STEPS = 4


def grads_of(engine):
    """Return the gradients of the master weights."""
    return [p.grad for p in gradients.masters_of(engine.optimizer)]


def dtype_of(engine):
    """Return the dtype of the gradients of the step, None if there are none."""
    (dtype,) = {None if grad is None else grad.dtype for grad in grads_of(engine)}
    return dtype


def steps(engine, first=0):
    """Train, with a NaN on one rank; return the gradients of a parameter after each step."""
    grads = []
    for step in range(first, first + STEPS):
        is_poisoned = step == 2 and engine.global_rank == 1
        take_step(engine, step, *["wide"] * is_poisoned)
        if dtype_of(engine) and engine.is_gradient_accumulation_boundary():
            grads.append(safe_get_full_grad(engine.module.conv).clone())
    return grads


def is_reported(engine):
    """Return whether the optimizer's report counts the bytes of the gradients in their dtype."""
    report = base_optimizer(engine).memory_report().grad_bytes
    grads = [grad for grad in grads_of(engine) if grad is not None]
    return sum(report.values()) == sum(grad.nbytes for grad in grads) and set(report) == {
        str(grad.dtype).removeprefix("torch.") for grad in grads
    }


def run_layouts(layouts):
    """Return, by layout, for engines of both kinds: their gradients' dtype, and what they hold."""
    return {
        name: [(steps(one), dtype_of(one), held(one), is_reported(one)) for one in pair(ds_config)]
        for name, (ds_config, _) in layouts.items()
    }


def a_third(grad, *_):
    """Return numbers that bfloat16 does not hold."""
    return grad / 3


def write_full(engine, param):
    safe_set_full_grad(param, a_third(safe_get_full_grad(param)))


def write_vectorized(engine, param):
    safe_update_full_grad_vectorized([param], a_third)


def write_local(engine, param):
    numel = param.ds_tensor.numel()
    safe_set_local_grad(param, torch.full((numel,), 1 / 3))


def write_partitions(engine, param):
    partitions = engine.optimizer.get_fp32_grad_partitions()
    for grad in (grad for of_group in partitions.values() for grad in of_group.values()):
        grad.copy_(a_third(grad))


WRITES = {
    "zero2, full": ("zero2", write_full),
    "zero2, vectorized": ("zero2", write_vectorized),
    "zero2, round robin, full": ("zero2, round robin", write_full),
    "zero3, full": ("zero3", write_full),
    "zero3, vectorized": ("zero3", write_vectorized),
    "zero3, local": ("zero3", write_local),
    "zero3, partitions": ("zero3", write_partitions),
}


def run_writes(layouts):
    """Return, by way of writing, what engines of both kinds hold after a script wrote gradients."""
    result = {}
    for name, (layout, write) in WRITES.items():
        result[name] = []
        for engine in pair(layouts[layout][0]):
            take_step(engine, 0)
            for step in (1, 2):
                engine.backward(engine(step))
                write(engine, engine.module.conv)
                read = safe_get_full_grad(engine.module.conv).clone()
                engine.step()
            steps(engine, 3)
            result[name].append((dtype_of(engine), read, held(engine)))
    return result


def divide(optimizer, *_):
    """Write gradients, as a hook of the optimizer's step."""
    for p in optimizer.param_groups[0]["params"]:
        if p.grad is not None:
            p.grad.div_(3)


def run_hooks(layouts):
    """Return, by layout, what engines of both kinds hold after steps with a hook."""
    result = {}
    for name in COPIED:
        result[name] = []
        for engine in pair(layouts[name][0]):
            take_step(engine, 0)
            base_optimizer(engine).register_step_pre_hook(divide)
            steps(engine, 1)
            result[name].append((dtype_of(engine), held(engine)))
    return result


def run_copies(layouts):
    """Return, by layout, whether a deep copy of the optimizer has equal tensors of its own."""
    result = {}
    for name in COPIED:
        engine = make_engine(layouts[name][0], Bag())
        steps(engine)
        optimizer = base_optimizer(engine)
        new = copy.deepcopy(optimizer)
        pairs = [
            (ours, theirs)
            for p, q in zip(optimizer.state, new.state, strict=True)
            for ours, theirs in ((p, q), (p.grad, q.grad))
            if ours is not None
        ]
        assert pairs
        result[name] = all(
            difference(ours, theirs) == "" and ours.data_ptr() != theirs.data_ptr()
            for ours, theirs in pairs
        )
    return result


def run_saved(ds_config):
    """Return ZeRO-3's masters in a copied state dict, its own, and whether a dict has these."""
    engine = make_engine(ds_config, Bag())
    steps(engine)
    saved = copy.deepcopy(engine.optimizer.state_dict())["fp32_flat_groups"]
    (alive, *_), (p, *_) = (
        engine.optimizer.state_dict()["fp32_flat_groups"],
        gradients.masters_of(engine.optimizer),
    )
    is_same = alive.data_ptr() == p.data_ptr() and alive.requires_grad == p.requires_grad
    return saved, gradients.masters_of(engine.optimizer), is_same and vars(alive) == vars(p)


def run_everything(layouts):
    return (
        run_writes(layouts),
        dtype_of(make_engine(THEIRS, Bag())),
        run_hooks(layouts),
        run_copies(layouts),
        run_saved(layouts["zero3"][0]),
    )


@pytest.fixture(scope="module")
def ranks(standing_ranks):
    return standing_ranks(2).run(run_everything, timeout_s=400, layouts=QUICK)


@pytest.fixture(scope="module")
def pairs_of(standing_ranks):
    """Return a function: of a layout, what `run_layouts` returned for it on each rank."""

    @cache
    def run(is_slow):
        return standing_ranks(2).run(run_layouts, timeout_s=400, layouts=SLOW if is_slow else QUICK)

    return lambda name: [found[name] for found in run(name in SLOW)]


@pytest.mark.parametrize("name", NAMES)
def test_step_with_gradients_of_16_bits_holds_the_bits_of_float32_ones(pairs_of, name):
    _, expected = (QUICK | SLOW)[name]
    for one, other in pairs_of(name):
        (grads, dtype, ours, reports), (their_grads, their_dtype, theirs, also_reports) = one, other
        assert (dtype, their_dtype) == (expected, expected and FP32)
        assert reports and also_reports
        assert difference(ours, theirs) == ""
        assert difference([g.float() for g in grads], [g.float() for g in their_grads]) == ""


@pytest.mark.parametrize("name", WRITES)
def test_gradients_that_a_script_writes_are_kept_in_float32(ranks, name):
    for writes, *_ in ranks:
        (dtype, read, ours), (_, their_read, theirs) = writes[name]
        assert dtype == FP32
        assert torch.equal(read, their_read) and not torch.equal(read, read.to(BF16).float())
        assert difference(ours, theirs) == ""


def test_gradients_of_another_optimizer_stay_as_deepspeed_makes_them(ranks):
    assert [theirs for _, theirs, *_ in ranks] == [FP32, FP32]


@pytest.mark.parametrize("name", COPIED)
def test_gradients_that_a_hook_before_the_step_writes_are_kept_in_float32(ranks, name):
    for *_, hooks, _, _ in ranks:
        (dtype, ours), (_, theirs) = hooks[name]
        assert dtype == FP32
        assert difference(ours, theirs) == ""


@pytest.mark.parametrize("name", COPIED)
def test_deep_copy_of_the_optimizer_has_gradients_of_its_own(ranks, name):
    assert [copies[name] for *_, copies, _ in ranks] == [True, True]


def test_state_dict_of_zero3_can_be_copied_and_has_the_masters_memory(ranks):
    for *_, (saved, masters, is_same) in ranks:
        assert is_same
        assert difference(saved, masters) == ""


class Zero:
    """Stands for an engine's optimizer, of ZeRO-2; a gradient of 1.5 is on its way from a GPU."""

    def __init__(self, grad):
        self.single_partition_of_fp32_groups = [torch.zeros(3, requires_grad=True)]
        (p,) = self.single_partition_of_fp32_groups
        p.grad = grad
        self.refreshed = 0

    def _wait_for_offload_copies(self):
        self.single_partition_of_fp32_groups[0].grad.fill_(1.5)

    def _get_offload_gradient_dict(self):
        self.refreshed += 1


def test_narrow_memory_that_deepspeed_frees_itself_stays():
    (p,) = Zero(torch.zeros(3)).single_partition_of_fp32_groups
    p.grad.ds_pin_base = p.grad
    gradients._narrow(p, BF16)
    assert p.grad.dtype == FP32


def test_narrow_without_grad_dtype_in_torch_leaves_float32(monkeypatch):
    (p,) = Zero(torch.zeros(3)).single_partition_of_fp32_groups
    monkeypatch.setattr(gradients, "Tensor", object)
    gradients._narrow(p, BF16)
    assert p.grad.dtype == FP32
    assert gradients._can_hold(p, FP32)


def test_narrow_of_the_dtype_that_is_there_keeps_the_memory():
    (p,) = Zero(torch.zeros(3)).single_partition_of_fp32_groups
    before = p.grad
    gradients._narrow(p, FP32)
    assert p.grad is before


def test_widen_keeps_values_that_arrive_tells_why_once_and_refreshes_views(caplog):
    zero = Zero(torch.zeros(3))
    (p,) = zero.single_partition_of_fp32_groups
    gradients._narrow(p, BF16)
    with caplog.at_level(logging.WARNING, "zero8"):
        for _ in range(2):
            gradients.widen(zero, "of a test")
    assert p.grad.tolist() == [1.5] * 3 and p.grad.dtype == FP32
    assert zero.refreshed == 1
    assert caplog.messages == [
        "zero8: gradients in host memory are float32 from now on, and take more: of a test"
    ]
