# SPDX-License-Identifier: Apache-2.0
"""16-bit weights that the step writes have the bits of DeepSpeed's copy of the master weights."""

import inspect
from types import MethodType

import deepspeed
import pytest
import torch
from nests import difference
from plan_worker import not_within
from zero_worker import Bag, base_optimizer, config, held, make_engine, take_step

import zero8
from zero8.deepspeed.step import CopyTarget, _buffer

BUFFERS = "param_buffer_of_bit16_for_cpu_offload_groups"
STEPS, REASSIGNS = "_optimizer_step", "_reassign_or_swap_out_partitioned_parameters"

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
UNCHECKED = {"check_grad_overflow": False}
BF16 = {"dtype": {"bf16_master_weights_and_grads": True}}
LAYOUTS = {
    "zero1": config(stage=1, dtype={}),
    "zero2": config(stage=2, dtype={}) | {"gradient_clipping": 0.5},
    "zero2, fp16": config(stage=2) | FP16,
    "zero2, dynamic, Lion": config(2, dtype={}, optimizer="Lion8bitBlockwise", codec="dynamic"),
    "zero2, bf16 masters": config(2, **BF16) | {"gradient_clipping": 0.5},
    "zero2, 24-bit masters": config(2, **BF16, weight_correction_bits=8),
    "zero2, NaN": config(stage=2, dtype=UNCHECKED),
    "zero3": config(stage=3, dtype={}),
    "zero3, sub-groups": config(stage=3, dtype={}, zero={"sub_group_size": 5000}),
    "zero3, fp16": config(stage=3) | FP16,
}
STEPS_TAKEN = 6


def unfused(engine):
    """Give an engine DeepSpeed's own methods back."""
    zero = engine.optimizer
    for name in (STEPS, REASSIGNS):
        if hasattr(zero, name):
            own = inspect.unwrap(getattr(type(zero), name))
            setattr(zero, name, MethodType(own, zero))
    return engine


def partitions(engine):
    """Return this rank's master weights and 16-bit weights, flat."""
    zero = engine.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat
    rank = engine.global_rank
    return zero.single_partition_of_fp32_groups, [
        parts[rank] for parts in zero.parallel_partitioned_bit16_groups
    ]


def is_rounded(master, weight):
    """Return whether all weights are what torch makes of the masters; padding may be NaN."""
    expected = master.detach().to(weight.dtype)
    return torch.equal(expected.nan_to_num(), weight.detach().nan_to_num())


def run(engine, name, drops):
    """Train, and write to the masters between two steps.

    Args:
        engine: the engine.
        name: the name of its layout.
        drops: whether to set the corrections of these masters to 0, as a step does by itself.

    Returns:
        For each step, whether the weights are the rounded masters afterwards.
        For each call of the optimizer, how many copies it was asked for.
    """
    weights, written = [], []
    optimizer = base_optimizer(engine)
    for step in range(STEPS_TAKEN):
        masters, _ = partitions(engine)
        if step == 3:
            for p in masters:
                p.detach().mul_(1.25)  # also the padding
                if drops and "24-bit" in name:
                    optimizer.state[p]["param_correction"].zero_()
        poison = ["wide"] if "NaN" in name and step in (0, 4) and engine.global_rank == 1 else []
        before = len(optimizer.copies)
        hook = optimizer.register_step_pre_hook(
            lambda optimizer, *_: written.append(len(optimizer.copies))
        )
        take_step(engine, step, *poison)
        hook.remove()
        assert before == len(optimizer.copies) == 0
        # DeepSpeed has skipped each copy that the step had written.
        buffers = getattr(engine.optimizer, BUFFERS, [])
        assert all(getattr(buffer, "written_from", None) is None for buffer in buffers)
        weights.append(all(map(is_rounded, *partitions(engine))))
    return weights, written


def run_pairs(layouts):
    """Return, by layout, for fused and unfused engines, what `run` returns and what is held."""
    result = {}
    for name, ds_config in layouts.items():
        engines = make_engine(ds_config, Bag()), unfused(make_engine(ds_config, Bag()))
        result[name] = [
            (*run(engine, name, drops), held(engine), has_buffers(engine))
            for drops, engine in enumerate(engines)
        ]
    return result


def has_buffers(engine):
    """Return whether DeepSpeed's buffers between masters and weights have memory of their own."""
    zero = engine.optimizer
    weights = getattr(zero, "bit16_groups_flat", [])
    return bool(not_within(weights, getattr(zero, BUFFERS, [])))


def run_hooked(ds_config):
    """Return the masters and the weights after a step whose hook changes the masters."""
    engine = make_engine(ds_config, Bag())
    take_step(engine, 0)
    with_hook = partitions(engine)[0]

    def halve(*_):
        for p in with_hook:
            p.data.mul_(0.5)  # unseen by version counters

    base_optimizer(engine).register_step_post_hook(halve)
    take_step(engine, 1)
    return [[part.detach().clone() for part in parts] for parts in partitions(engine)]


class Derived(zero8.Adam8bitBlockwise):
    """An optimizer whose class and base class both patch DeepSpeed."""


def run_derived(ds_config):
    """Return, for each step, whether the weights are the rounded masters; a hook comes later."""
    ds_config = {key: value for key, value in ds_config.items() if key != "optimizer"}
    bag = Bag()
    engine, *_ = deepspeed.initialize(
        model=bag,
        optimizer=Derived(bag.parameters(), lr=0.01),
        config={**ds_config, "zero_force_ds_cpu_optimizer": False},
    )
    rounded = []
    for step in range(5):
        if step == 3:
            base_optimizer(engine).register_step_post_hook(lambda *_: None)
        take_step(engine, step)
        rounded.append(all(map(is_rounded, *partitions(engine))))
    return rounded


def run_everything(layouts):
    some = [layouts[name] for name in ("zero2", "zero3")]
    return (
        run_pairs(layouts),
        [run_hooked(ds_config) for ds_config in some],
        [run_derived(ds_config) for ds_config in some],
    )


@pytest.fixture(scope="module")
def ranks(standing_ranks):
    run = standing_ranks(2).run
    return run(run_everything, timeout_s=400, layouts=LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_that_the_step_writes_equal_those_that_deepspeed_copies(ranks, name):
    for pairs, *_ in ranks:
        (ours, asked, our_states, ours_have), (theirs, none, their_states, they_have) = pairs[name]
        # Without a GPU the weights are the buffer.
        assert not ours_have and they_have == name.startswith(("zero1", "zero2"))
        assert all(ours) and all(theirs) and difference(our_states, their_states) == ""
        # DeepSpeed makes the first copy, and the one after the write from outside.
        per_step = len(asked) // STEPS_TAKEN
        assert [bool(sum(asked[at : at + per_step])) for at in range(0, len(asked), per_step)] == [
            step not in (0, 3) for step in range(STEPS_TAKEN)
        ]
        assert not any(none)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buffer_beside_weights_on_a_gpu_is_that_of_deepspeed_or_bf16_masters(dtype):
    p, weights = torch.ones(6, dtype=dtype), torch.ones(6, dtype=torch.bfloat16, device="meta")
    buffer = torch.zeros(6, dtype=torch.bfloat16)
    found = _buffer(p, buffer, weights)
    assert found.data_ptr() == (buffer if dtype == torch.float32 else p).data_ptr()
    assert isinstance(found, CopyTarget) is (dtype == torch.float32)


def test_weights_of_a_derived_optimizer_are_the_rounded_masters(ranks):
    for *_, derived in ranks:
        assert derived == [[True] * 5] * 2


def test_copy_target_skips_one_copy_of_the_weights_that_were_written():
    weights, other = torch.ones(4), torch.full((4,), 2.0)
    target = torch.zeros(4, dtype=torch.bfloat16).as_subclass(CopyTarget)
    target.written_from = weights.data_ptr()
    target.data.copy_(weights.data)
    assert target.tolist() == [0.0] * 4
    target.data.copy_(weights.data)
    assert target.tolist() == [1.0] * 4
    target.written_from = weights.data_ptr()
    target.data.copy_(other)  # also the last word on what was written
    target.data.copy_(weights.data)
    assert target.tolist() == [1.0] * 4
    model = torch.zeros(4, dtype=torch.bfloat16)
    model.data.copy_(target.data, non_blocking=True)
    assert model.tolist() == [1.0] * 4 and type(target + 1) is torch.Tensor


def test_weights_after_a_hook_of_the_step_are_those_that_it_left(ranks):
    for *_, hooked, _ in ranks:
        for masters, weights in hooked:
            for master, weight in zip(masters, weights, strict=True):
                assert is_rounded(master, weight)
