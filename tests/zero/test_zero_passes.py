# SPDX-License-Identifier: Apache-2.0
"""Engines without DeepSpeed's passes and second copies hold the bits of engines that have them.

Gradients stay in 16 bits and where they were reduced, the step multiplies them and writes the
16-bit weights, and master weights may be the weights.
"""

import pytest
import torch
from nests import difference
from torch import Tensor
from zero_worker import base_optimizer, config, held, pair, pattern, take_step

from zero8.deepspeed.gradients import masters_of
from zero8.deepspeed.step import CopyTarget

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BUFFERS = "param_buffer_of_bit16_for_cpu_offload_groups"
CLIP = {"gradient_clipping": 0.5}
GAS = {"gradient_accumulation_steps": 2}
HALF = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
FP32_GRADS = {"data_types": {"grad_accum_dtype": "fp32"}}
MASTERS = {"dtype": {"bf16_master_weights_and_grads": True}}
UNCHECKED = {"check_grad_overflow": False}
SMALL = {"sub_group_size": 5000}
ON_CPU = {"offload_param": {"device": "cpu"}}
LION = {"optimizer": "Lion8bitBlockwise"}
# By layout: its config, the dtype of the gradients, and in ZeRO-3 whether it has weights, and
# gradients, once.
QUICK = {
    "zero2": (config(2, dtype={}) | CLIP, BF16),
    "zero2, summed in fp32": (config(2, dtype={}) | CLIP | GAS | FP32_GRADS, FP32),
    "zero2, fp16": (config(2) | CLIP | HALF, FP16),
    "zero2, fp32 without clipping": (config(2), FP32),
    "zero2, 24-bit masters": (config(2, **MASTERS, weight_correction_bits=8) | CLIP, BF16),
    "zero2, NaN taken": (config(2, dtype=UNCHECKED), BF16),
    "zero3": (config(3, dtype={}) | CLIP, BF16, False, True),
    "zero3, sub-groups, accumulated": (
        config(3, dtype={}, zero=SMALL) | CLIP | GAS, BF16, False, False
    ),
    "zero3, bf16 masters": (config(3, **MASTERS) | CLIP, BF16, True, True),
}  # fmt: skip
SLOW = {
    "zero1": (config(1, dtype={}) | CLIP, BF16),
    "zero2, without clipping": (config(2, dtype={}), BF16),
    "zero2, accumulated": (config(2, dtype={}) | CLIP | GAS, BF16),
    "zero2, dynamic, Lion": (config(2, dtype={}, codec="dynamic", **LION) | CLIP, BF16),
    "zero2, fp32": (config(2) | CLIP, FP32),
    "zero2, bf16 masters": (config(2, **MASTERS) | CLIP, BF16),
    "zero2, no offload": (config(2, offload=None, dtype={}) | CLIP, None),
    "zero3, fp16": (config(3) | CLIP | HALF, FP16, False, True),
    "zero3, summed in fp32": (config(3, dtype={}) | CLIP | GAS | FP32_GRADS, FP32, False, False),
    "zero3, fp32 throughout": (config(3, zero=ON_CPU), FP32, True, True),
    "zero3, 24-bit masters": (
        config(3, **MASTERS, weight_correction_bits=8) | CLIP, BF16, True, True
    ),
    "zero3, bf16 masters, weights offloaded": (
        config(3, **MASTERS, zero=SMALL | ON_CPU) | CLIP, BF16, True, True
    ),
    "zero3, bf16 masters, accumulated": (
        config(3, **MASTERS, zero=SMALL) | CLIP | GAS, BF16, True, False
    ),
}  # fmt: skip
LAYOUTS = QUICK | SLOW
NAMES = (*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))
STEPS, WRITTEN = 6, 3
"""Before the step `WRITTEN` something writes to the masters."""


def is_shared(engine):
    """Return whether all master weights are the weights, and all gradients the reduced ones."""
    zero = engine.optimizer
    masters = masters_of(zero)
    if not hasattr(zero, "grad_partitions_flat_buffer"):
        return ()
    places, first = [], zero.grad_partitions_flat_buffer.data_ptr()
    for p in masters:
        places.append(first)
        first += p.grad.nbytes
    return (
        all(map(Tensor.is_set_to, masters, zero.fp16_partitioned_groups_flat)),
        [p.grad.data_ptr() for p in masters] == places,
    )


def grads_of(engine):
    """Return the gradients of the master weights."""
    return [p.grad for p in masters_of(engine.optimizer)]


def dtype_of(engine):
    """Return the dtype of the gradients of the step, None if there are none."""
    (dtype,) = {None if grad is None else grad.dtype for grad in grads_of(engine)}
    return dtype


def are_rounded(engine):
    """Return whether all weights are what torch makes of the masters; padding may be NaN."""
    zero = engine.optimizer
    weights = getattr(zero, "fp16_partitioned_groups_flat", None) or [
        parts[engine.global_rank] for parts in zero.parallel_partitioned_bit16_groups
    ]
    return all(
        torch.equal(p.detach().to(w.dtype).nan_to_num(), w.detach().nan_to_num())
        for p, w in zip(masters_of(zero), weights, strict=True)
    )


def run(engine, name, drops):
    """Train, with a NaN on one rank, and write to the masters between two steps.

    `drops` says whether to set the corrections of these masters to 0, as a step does by itself.
    Returns what the step was asked for, and what is held.
    """
    optimizer, factors, asked, rounded = base_optimizer(engine), [], set(), []
    scale_grads, optimizer_step = optimizer.scale_grads, optimizer.step

    def scaled(factor):
        factors.append(float(factor))
        scale_grads(factor)

    def stepped(*args):
        if optimizer.copies:
            asked.add(step)
        return optimizer_step(*args)

    optimizer.scale_grads, optimizer.step = scaled, stepped
    for step in range(STEPS):
        if step == WRITTEN:
            for p in masters_of(engine.optimizer):
                p.detach().mul_(1.25)  # also the padding
                if drops and "24-bit" in name:
                    optimizer.state[p]["param_correction"].zero_()
        # DeepSpeed does not clear a sum in float32 that a NaN has reached.
        is_poisoned = step == 2 and engine.global_rank == 1 and "summed" not in name
        poison = ["wide"] if is_poisoned else []
        for batch in range(engine.gradient_accumulation_steps()):
            take_step(engine, 2 * step + batch, *poison)
        assert not optimizer.copies
        rounded.append(are_rounded(engine))
    buffers = getattr(engine.optimizer, BUFFERS, [])
    # DeepSpeed has skipped each copy that the step had written.
    assert all(getattr(buffer, "written_from", None) is None for buffer in buffers)
    return {
        "factors": any(factor != 1.0 for factor in factors),
        "asked": asked,
        "rounded": all(rounded),
        "dtype": dtype_of(engine),
        "shared": is_shared(engine),
        "held": held(engine),
    }


def run_pairs(layouts):
    """Return, by layout, what `run` returns for our engine and for one of DeepSpeed's way."""
    return {
        name: [run(one, name, drops) for drops, one in enumerate(pair(ds_config))]
        for name, (ds_config, *_) in layouts.items()
    }


@pytest.fixture(scope="module")
def quick(standing_ranks):
    return standing_ranks(2).run(run_pairs, timeout_s=400, layouts=QUICK)


@pytest.fixture(scope="module")
def slow(standing_ranks):
    return standing_ranks(2).run(run_pairs, timeout_s=500, layouts=SLOW)


@pytest.mark.parametrize("name", NAMES)
def test_engine_without_passes_and_copies_holds_the_bits_of_one_with_them(request, name):
    ds_config, dtype, *shared = LAYOUTS[name]
    is_offloaded = "offload_optimizer" in ds_config["zero_optimization"]
    is_16_bit = bool({"bf16", "fp16"} & ds_config.keys())
    # DeepSpeed makes the first copy, and the one after a write from outside.
    skipped = {0, WRITTEN} | ({2} if not {"NaN", "summed"} & set(name.split()) else set())
    copied = is_offloaded and is_16_bit and shared[:1] != [True]
    for rank in request.getfixturevalue("quick" if name in QUICK else "slow"):
        ours, theirs = rank[name]
        assert difference(ours.pop("held"), theirs.pop("held")) == ""
        assert ours["factors"] == (ds_config["gradient_clipping"] > 0 or "fp16" in ds_config)
        assert ours["asked"] == (set(range(STEPS)) - skipped if copied else set())
        assert (ours["dtype"], list(ours["shared"])) == (dtype, shared)
        assert not (theirs["factors"] or theirs["asked"] or any(theirs["shared"]))
        assert ours["rounded"] and theirs["rounded"]


# --- Gradients that are used again ---------------------------------------------------------------


class Idle(torch.nn.Module):
    """Two parameters, of which the second is not used in every step."""

    def __init__(self):
        super().__init__()
        self.always = torch.nn.Parameter(pattern("always", (64, 64)))
        self.at_times = torch.nn.Parameter(pattern("at times", (64, 64)))

    def forward(self, step, is_used, is_infinite=False):
        loss = (self.always * pattern(f"a {step}", (64, 64)).to(self.always.dtype)).sum()
        if is_used:
            loss = loss + (self.at_times * pattern(f"b {step}", (64, 64)).to(loss.dtype)).sum()
        return loss + self.always.sum() * torch.inf if is_infinite else loss


# For each micro-batch, the arguments after the step's number.
USES = {
    "idle": [(1,), (1,), (0,), (0,), (1,), (0,)],
    "idle after an overflow": [(1,), (1,), (1, True), (0,), (0,), (1,), (0,)],
    "idle in the first micro-batch": [(1,), (1,), *3 * [(0,), (1,)], (0,), (0,), (0,), (1,)],
    "idle in the last micro-batch": [(1,), (1,), *2 * [(1,), (0,)], (0,), (0,), (1,), (0,)],
}
IDLE = {
    "zero1, clipped": (config(1, dtype={}) | CLIP, "idle"),
    "zero2, clipped": (config(2, dtype={}) | CLIP, "idle"),
    "zero2, no offload, clipped": (config(2, offload=None, dtype={}) | CLIP, "idle"),
    "zero2, fp16": (config(2) | HALF, "idle after an overflow"),
    "zero2, bf16 masters": (config(2, **MASTERS) | CLIP | GAS, "idle in the first micro-batch"),
    "zero2, accumulated": (config(2, dtype={}) | CLIP | GAS, "idle in the first micro-batch"),
    "zero3, clipped": (config(3, dtype={}) | CLIP, "idle"),
    "zero3, fp16": (config(3) | HALF | CLIP, "idle after an overflow"),
    "zero3, bf16 masters": (config(3, **MASTERS) | CLIP | GAS, "idle in the last micro-batch"),
    "zero3, accumulated": (config(3, **MASTERS) | CLIP | GAS, "idle in the first micro-batch"),
}


def train_idle(engine, uses):
    for step, use in enumerate(uses):
        engine.backward(engine(step, *use))
        engine.step()
    return held(engine)


def idle_pairs(layouts):
    """Return, by layout, how engines of both kinds differ after steps that use not all."""
    return {
        name: difference(*[train_idle(one, USES[uses]) for one in pair(ds_config, Idle)])
        for name, (ds_config, uses) in layouts.items()
    }


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["one rank", "two ranks"]
)
def test_gradient_that_is_used_again_has_been_multiplied_each_time(ranks, standing_ranks):
    """DeepSpeed does not clear the buffer of a parameter that gets no gradient."""
    for found in standing_ranks(ranks).run(idle_pairs, timeout_s=300, layouts=IDLE):
        assert found == dict.fromkeys(IDLE, "")


def test_copy_target_skips_one_copy_of_the_weights_that_were_written():
    weights, other = torch.ones(4), torch.full((4,), 2.0)
    target = torch.zeros(4, dtype=BF16).as_subclass(CopyTarget)
    target.written_from = weights.data_ptr()
    target.data.copy_(weights.data)
    assert target.tolist() == [0.0] * 4
    target.data.copy_(weights.data)
    assert target.tolist() == [1.0] * 4
    target.written_from = weights.data_ptr()
    target.data.copy_(other)  # also the last word on what was written
    target.data.copy_(weights.data)
    assert target.tolist() == [1.0] * 4
    model = torch.zeros(4, dtype=BF16)
    model.data.copy_(target.data, non_blocking=True)
    assert model.tolist() == [1.0] * 4 and type(target + 1) is torch.Tensor
