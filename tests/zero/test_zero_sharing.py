# SPDX-License-Identifier: Apache-2.0
"""Engines of ZeRO-3 that keep weights and gradients once hold the bits of those that copy them."""

from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from nests import difference
from torch import Tensor
from zero_worker import Bag, config, held, make_engine, pair, take_step, train

CLIP = {"gradient_clipping": 0.5}
GAS = {"gradient_accumulation_steps": 2}
BF16 = {"dtype": {"bf16_master_weights_and_grads": True}}
SMALL = {"sub_group_size": 5000}
ON_CPU = {"offload_param": {"device": "cpu"}}
FP32_GRADS = {"data_types": {"grad_accum_dtype": "fp32"}}
# By layout: its config, and whether it shares weights and gradients.
LAYOUTS = {
    "bf16 masters": (config(3, **BF16) | CLIP, True, True),
    "bf16 masters, weights offloaded": (config(3, **BF16, zero=SMALL | ON_CPU) | CLIP, True, True),
    "bf16 masters, accumulated": (config(3, **BF16, zero=SMALL) | CLIP | GAS, True, False),
    "24-bit masters": (config(3, **BF16, weight_correction_bits=8) | CLIP, True, True),
    "fp32 throughout": (config(3, zero=ON_CPU), True, True),
    "fp32 masters": (config(3, dtype={}) | CLIP, False, True),
    "fp32 masters, accumulated": (config(3, dtype={}) | CLIP | GAS, False, False),
    "fp32 masters and gradients": (config(3, dtype={}) | CLIP | FP32_GRADS, False, True),
}
DEEPSPEEDS = config(3, zero=ON_CPU, optimizer="AdamW")
STEPS = 3
"""Before, with and after a NaN; a step takes a micro-batch or, accumulated, two."""
MOVED = "bf16 masters"
SAVED = "bf16 masters, weights offloaded"


def is_shared(engine):
    """Return whether all master weights are the weights, and all gradients the reduced ones."""
    zero = engine.optimizer
    masters = zero.fp32_partitioned_groups_flat
    places, first = [], zero.grad_partitions_flat_buffer.data_ptr()
    for p in masters:
        places.append(first)
        first += p.grad.nbytes
    return (
        all(map(Tensor.is_set_to, masters, zero.fp16_partitioned_groups_flat)),
        [p.grad.data_ptr() for p in masters] == places,
    )


def steps(engine, first=0):
    """Train, with a NaN on one rank; return the full gradients of a parameter after each step."""
    grads, batches = [], engine.gradient_accumulation_steps()
    for batch in range(first * batches, (first + STEPS) * batches):
        is_poisoned = batch == batches and engine.global_rank == 1
        take_step(engine, batch, *["wide"] * is_poisoned)
        if (batch + 1) % batches == 0:
            grads.append(safe_get_full_grad(engine.module.conv).clone())
    return grads


def run_pairs(layouts):
    """Return, by layout, for engines that share and that copy: what is shared, and what is held."""
    result = {}
    for name, (ds_config, *_) in layouts.items():
        result[name] = [
            (is_shared(one), steps(one), held(one), is_shared(one)) for one in pair(ds_config)
        ]
    return result


def run_moved(ds_config):
    """Return what engines hold that go on after DeepSpeed has moved the weights."""
    result = []
    # DeepSpeed fails to move the frozen weights of a Bag.
    for engine in pair(ds_config, model=lambda: None):
        train(engine, 2)
        engine.offload_states(include=[OffloadStateTypeEnum.lp_params])  # copies to new memory
        engine.reload_states()
        train(engine, 2, 2)
        result.append((is_shared(engine), held(engine)))
    return result


def run_grown(ds_config):
    """Return what engines hold that go on with two micro-batches per step."""
    result = []
    for engine in pair(ds_config):
        steps(engine)
        engine.set_train_batch_size(2 * engine.train_batch_size())
        steps(engine, STEPS)
        result.append((is_shared(engine), held(engine)))
    return result


def run_between(ds_config):
    """Return what engines hold after a write to a gradient between two backwards of a step."""
    result = []
    for engine in pair(ds_config):
        for step in range(STEPS):
            engine.backward(engine(step))
            safe_set_full_grad(engine.module.conv, torch.full(Bag.SHAPES["conv"], 0.5))
            engine.backward(engine(step + STEPS))
            engine.step()
        result.append(held(engine))
    return result


def run_written(ds_config):
    """Return weights after writes to their masters, and masters after a write to their weights."""
    engine = make_engine(ds_config, Bag())
    wide, conv = engine.module.wide, engine.module.conv
    safe_set_full_fp32_param(wide, torch.full(wide.ds_shape, 0.25))
    with deepspeed.zero.GatheredParameters([conv], modifier_rank=0):
        if engine.global_rank == 0:
            conv.data.fill_(0.5)
    with deepspeed.zero.GatheredParameters([wide]):
        return wide.detach().clone(), safe_get_full_fp32_param(conv)


def run_saved(ds_config, folder):
    """Return what engines hold that go on from checkpoints of each kind, and the files' bytes."""
    result, sizes = [], {}
    for kind, engine in zip(("shared", "copied"), pair(ds_config), strict=True):
        steps(engine)
        engine.save_checkpoint(folder, tag=kind)
        sizes[kind] = sum(path.stat().st_size for path in Path(folder, kind).glob("*optim*"))
        steps(engine, STEPS)
        result.append(held(engine))
        for other in pair(ds_config):
            other.load_checkpoint(folder, tag=kind)
            steps(other, STEPS)
            result.append(held(other))
    return result, sizes


def run_everything(layouts, folder):
    configs = {name: ds_config for name, (ds_config, *_) in layouts.items()}
    return (
        run_pairs(layouts),
        run_moved(configs[MOVED]),
        run_written(configs[SAVED]),
        run_saved(configs[SAVED], folder),
        is_shared(make_engine(DEEPSPEEDS, Bag())),
        run_grown(configs[MOVED]),
        run_between(configs[MOVED]),
    )


@pytest.fixture(scope="module")
def ranks(standing_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return standing_ranks(2).run(run_everything, timeout_s=400, layouts=LAYOUTS, folder=folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_engine_that_shares_memory_holds_the_bits_of_one_that_copies(ranks, name):
    _, *expected = LAYOUTS[name]
    for pairs, *_ in ranks:
        (shared, grads, ours, later), (copied, their_grads, theirs, _) = pairs[name]
        assert list(shared) == list(later) == expected and not any(copied)
        assert difference(ours, theirs) == ""
        assert difference(grads, their_grads) == ""


def test_weights_that_deepspeed_moves_are_copied_from_then_on(ranks):
    for _, ((shared, ours), (copied, theirs)), *_ in ranks:
        assert shared == (False, True) and not any(copied)
        assert difference(ours, theirs) == ""


def test_write_to_shared_weights_changes_the_masters_and_the_other_way_round(ranks):
    for _, _, (weights, masters), *_ in ranks:
        assert torch.equal(weights, torch.full_like(weights, 0.25))
        assert torch.equal(masters, torch.full_like(masters, 0.5))


def test_checkpoint_of_shared_memory_goes_on_in_engines_of_both_kinds(ranks):
    for _, _, _, (engines, sizes), *_ in ranks:
        assert [difference(engines[0], other) for other in engines[1:]] == [""] * 5
        assert sizes["shared"] <= 1.01 * sizes["copied"]


def test_memory_of_another_optimizer_stays_as_deepspeed_makes_it(ranks):
    for *_, shared, _, _ in ranks:
        assert not any(shared)


def test_gradients_are_separate_once_micro_batches_are_accumulated(ranks):
    for *_, ((shared, ours), (copied, theirs)), _ in ranks:
        assert shared == (True, False) and not any(copied)
        assert difference(ours, theirs) == ""


def test_second_backward_of_a_step_does_not_add_to_a_gradient_that_a_script_wrote(ranks):
    for *_, (ours, theirs) in ranks:
        assert difference(ours, theirs) == ""
