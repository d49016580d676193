# SPDX-License-Identifier: Apache-2.0
"""Scripts, hooks and DeepSpeed itself that touch gradients and weights which are there once.

Engines then hold the bits of engines that have two of each and make DeepSpeed's passes.
"""

import copy
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_local_grad,
    safe_update_full_grad_vectorized,
)
from log_lines import warned
from nests import difference
from test_zero_passes import (
    BF16,
    CLIP,
    FP32,
    GAS,
    MASTERS,
    ON_CPU,
    SMALL,
    are_rounded,
    dtype_of,
    is_shared,
)
from zero_worker import Bag, base_optimizer, config, held, make_engine, pair, take_step, train

from zero8.deepspeed import gradients

ZERO2, ZERO3 = (config(stage, dtype={}) | CLIP for stage in (2, 3))
ACCUMULATED = config(3, dtype={}, zero=SMALL) | CLIP | GAS
UNCLIPPED = {"gradient_clipping": 0.0}
SHARED = config(3, **MASTERS) | CLIP
OFFLOADED = config(3, **MASTERS, zero=SMALL | ON_CPU) | CLIP


def steps(engine, first=0, number=3):
    for step in range(first, first + number):
        for _ in range(engine.gradient_accumulation_steps()):
            take_step(engine, step)


# --- What both kinds of engines meet -------------------------------------------------------------


def a_third(grad, *_):
    """Return numbers that bfloat16 does not hold."""
    return grad / 3


def write_full(engine, param):
    safe_set_full_grad(param, a_third(safe_get_full_grad(param)))


def write_vectorized(engine, param):
    safe_update_full_grad_vectorized([param], a_third)


def write_local(engine, param):
    safe_set_local_grad(param, torch.full((param.ds_tensor.numel(),), 1 / 3))


def write_partitions(engine, param):
    partitions = engine.optimizer.get_fp32_grad_partitions()
    for grad in (grad for of_group in partitions.values() for grad in of_group.values()):
        grad.copy_(a_third(grad))


def write(how):
    """Return a scenario in which a script writes a gradient before two of the steps."""

    def run(engine):
        take_step(engine, 0)
        for step in (1, 2):
            engine.backward(engine(step))
            how(engine, engine.module.conv)
            read = safe_get_full_grad(engine.module.conv)
            assert not torch.equal(read, read.to(BF16).float())
            engine.step()
        steps(engine, 3)

    return run


def divide_in_hook(engine):
    """Write gradients in a hook of the optimizer's step, before which DeepSpeed clips them."""

    def divide(optimizer, *_):
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.div_(3)

    steps(engine, number=1)
    base_optimizer(engine).register_step_pre_hook(divide)
    steps(engine, 1)


def halve_in_hook(engine):
    """Write master weights in a hook after the optimizer's step."""

    def halve(*_):
        for p in gradients.masters_of(engine.optimizer):
            p.data.mul_(0.5)  # unseen by version counters

    steps(engine, number=1)
    base_optimizer(engine).register_step_post_hook(halve)
    steps(engine, 1)
    assert are_rounded(engine)


def move_weights(engine):
    """Have DeepSpeed move the weights: it copies them to new memory."""
    train(engine, 2)
    engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
    engine.reload_states()
    train(engine, 2, 2)


def accumulate(engine):
    """Go on with two micro-batches per step."""
    steps(engine)
    engine.set_train_batch_size(2 * engine.train_batch_size())
    steps(engine, 3)


def write_between(engine):
    """Write a gradient between two backwards of a step, whose second must not add to it."""
    for step in range(3):
        engine.backward(engine(step))
        safe_set_full_grad(engine.module.conv, torch.full(Bag.SHAPES["conv"], 0.5))
        engine.backward(engine(step + 3))
        engine.step()


# The config, what happens, the gradients' dtype then, and what is there once.
CASES = {
    "zero2, full": (ZERO2, write(write_full), FP32, ()),
    "zero2, vectorized": (ZERO2, write(write_vectorized), FP32, ()),
    "zero2, hook": (ZERO2 | UNCLIPPED, divide_in_hook, FP32, ()),
    "zero2, hook after the step": (ZERO2, halve_in_hook, BF16, ()),
    "zero3, full": (ZERO3, write(write_full), FP32, (False, False)),
    "zero3, vectorized": (ZERO3, write(write_vectorized), FP32, (False, False)),
    "zero3, local": (ZERO3, write(write_local), FP32, (False, False)),
    "zero3, partitions": (ZERO3, write(write_partitions), FP32, (False, False)),
    "zero3, hook": (ZERO3 | UNCLIPPED, divide_in_hook, FP32, (False, False)),
    "zero3, accumulated, hook": (
        ACCUMULATED | UNCLIPPED, divide_in_hook, FP32, (False, False)
    ),
    "zero3, hook after the step": (ZERO3, halve_in_hook, BF16, (False, True)),
    "zero3, moved": (SHARED, move_weights, BF16, (False, True)),
    "zero3, more micro-batches": (SHARED, accumulate, BF16, (True, False)),
    "zero3, between backwards": (SHARED, write_between, BF16, (True, False)),
}  # fmt: skip


def meet(names):
    """Return, by case, what engines of both kinds hold after it, and ours of its gradients."""
    result = {}
    for name in names:
        ds_config, happens, *_ = CASES[name]
        # DeepSpeed fails to move the frozen weights of a Bag.
        model = (lambda: None) if happens is move_weights else Bag
        engines = pair(ds_config, model)
        for engine in engines:
            happens(engine)
        ours = engines[0]
        result[name] = difference(*map(held, engines)), dtype_of(ours), is_shared(ours)
    return result


@pytest.fixture(scope="module")
def met(standing_ranks):
    return standing_ranks(2).run(meet, timeout_s=400, names=list(CASES))


@pytest.mark.parametrize("name", CASES)
def test_engine_whose_gradients_or_weights_are_touched_holds_the_bits_of_one_with_copies(met, name):
    _, _, dtype, shared = CASES[name]
    for rank in met:
        assert rank[name] == ("", dtype, shared)


# --- What only ours has --------------------------------------------------------------------------


def write_weights(ds_config):
    """Return weights after writes to their masters, and masters after a write to their weights."""
    engine = make_engine(ds_config, Bag())
    wide, conv = engine.module.wide, engine.module.conv
    safe_set_full_fp32_param(wide, torch.full(wide.ds_shape, 0.25))
    with deepspeed.zero.GatheredParameters([conv], modifier_rank=0):
        if engine.global_rank == 0:
            conv.data.fill_(0.5)
    with deepspeed.zero.GatheredParameters([wide]):
        return wide.detach().clone(), safe_get_full_fp32_param(conv)


def save_and_go_on(ds_config, folder):
    """Return what engines hold that go on from checkpoints of each kind, and the files' bytes."""
    result, sizes = [], {}
    for kind, engine in zip(("shared", "copied"), pair(ds_config), strict=True):
        steps(engine)
        engine.save_checkpoint(folder, tag=kind)
        sizes[kind] = sum(path.stat().st_size for path in Path(folder, kind).glob("*optim*"))
        steps(engine, 3)
        result.append(held(engine))
        for other in pair(ds_config):
            other.load_checkpoint(folder, tag=kind)
            steps(other, 3)
            result.append(held(other))
    return [difference(result[0], other) for other in result[1:]], sizes


def copy_state_dict(ds_config):
    """Return ZeRO-3's masters in a copied state dict, and its own."""
    engine = make_engine(ds_config, Bag())
    steps(engine)
    saved, masters = engine.optimizer.state_dict(), gradients.masters_of(engine.optimizer)
    (alive, *_), (p, *_) = saved["fp32_flat_groups"], masters
    assert alive.data_ptr() == p.data_ptr() and vars(alive) == vars(p)
    return copy.deepcopy(saved)["fp32_flat_groups"], masters


def do_the_rest(folder):
    return {
        "written": write_weights(OFFLOADED),
        "saved": save_and_go_on(OFFLOADED, folder),
        "state dict": copy_state_dict(ZERO3),
    }


@pytest.fixture(scope="module")
def ranks(standing_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return standing_ranks(2).run(do_the_rest, timeout_s=400, folder=folder)


def test_write_to_shared_weights_changes_the_masters_and_the_other_way_round(ranks):
    for rank in ranks:
        weights, masters = rank["written"]
        assert torch.equal(weights, torch.full_like(weights, 0.25))
        assert torch.equal(masters, torch.full_like(masters, 0.5))


def test_checkpoint_of_shared_memory_goes_on_in_engines_of_both_kinds(ranks):
    for rank in ranks:
        differences, sizes = rank["saved"]
        assert differences == [""] * 5
        assert sizes["shared"] <= 1.01 * sizes["copied"]


def test_deep_copy_of_a_state_dict_has_tensors_of_its_own(ranks):
    for rank in ranks:
        assert difference(*rank["state dict"]) == ""


# --- On a GPU ------------------------------------------------------------------------------------


def zero_of(grad):
    """Return a stand-in for an engine's optimizer; a gradient of 1.5 is on its way from a GPU."""
    p = torch.zeros(3, requires_grad=True)
    p.grad = grad
    refreshed = []
    return SimpleNamespace(
        single_partition_of_fp32_groups=[p],
        _wait_for_offload_copies=lambda: p.grad.fill_(1.5),
        _get_offload_gradient_dict=lambda: refreshed.append(p.grad.dtype),
        refreshed=refreshed,
    )


def test_widen_keeps_values_that_arrive_tells_why_once_and_refreshes_views():
    zero = zero_of(torch.zeros(3))
    (p,) = zero.single_partition_of_fp32_groups
    gradients._narrow(p, BF16)
    with warned() as lines:
        for _ in range(2):
            gradients.widen(zero, "of a test")
    assert p.grad.tolist() == [1.5] * 3 and p.grad.dtype == FP32
    assert zero.refreshed == [FP32]
    assert len(lines) == 1 and lines[0].endswith("take more: of a test")
