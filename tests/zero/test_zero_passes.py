# SPDX-License-Identifier: Apache-2.0
"""Engines without DeepSpeed's passes and second copies hold the bits of engines that have them.

Gradients stay in 16 bits and where they were reduced, the step multiplies them and writes the
16-bit weights, and master weights may be the weights: whatever scripts, hooks and DeepSpeed itself
do to them.
"""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import deepspeed
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_local_grad,
    safe_update_full_grad_vectorized,
)
from log_lines import warned
from nests import assert_same
from params import each
from ranks import on_ranks
from torch import Tensor
from zero_worker import Bag, base_optimizer, config, held, pair, pattern, take_step, train

from zero8.deepspeed import gradients
from zero8.deepspeed.gradients import masters_of

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
STEPS, WRITTEN = 6, 3
"""Before the step `WRITTEN` something writes to the masters."""


# --- What engines meet ---------------------------------------------------------------------------


def steps(engine, first=0, number=3):
    for step in range(first, first + number):
        for _ in range(engine.gradient_accumulation_steps()):
            take_step(engine, step)


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


def idle(*uses):
    """Take steps that do not use all; `uses` are, of each micro-batch, arguments of `Idle`.

    DeepSpeed does not clear the buffer of a parameter that gets no gradient.
    """

    def run(engine):
        for step, use in enumerate(uses):
            take_step(engine, step, *use)

    return run


USED, UNUSED, INFINITE = (1,), (0,), (1, True)
AT_TIMES = idle(USED, USED, UNUSED, UNUSED, USED, UNUSED)
AFTER_OVERFLOW = idle(USED, USED, INFINITE, UNUSED, UNUSED, USED, UNUSED)
FIRST_UNUSED = idle(USED, USED, *3 * [UNUSED, USED], *3 * [UNUSED], USED)
LAST_UNUSED = idle(USED, USED, *2 * [USED, UNUSED], UNUSED, UNUSED, USED, UNUSED)


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
    """Return an event in which a script writes a gradient before two of the steps."""

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
        for p in masters_of(engine.optimizer):
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


def write_weights(engine):
    """Write one master, and another: of shared memory through its weight."""
    wide, conv = engine.module.wide, engine.module.conv
    safe_set_full_fp32_param(wide, torch.full(wide.ds_shape, 0.25))
    if is_shared(engine)[0]:
        with deepspeed.zero.GatheredParameters([wide, conv], modifier_rank=0):
            assert wide.eq(0.25).all()
            conv.data.fill_(0.5)
    else:
        safe_set_full_fp32_param(conv, torch.full(conv.ds_shape, 0.5))
    steps(engine)


def copy_state_dict(engine):
    """Copy ZeRO-3's state dict, whose master weights are the engine's own."""
    steps(engine)
    saved, masters = engine.optimizer.state_dict(), masters_of(engine.optimizer)
    (alive, *_), (p, *_) = saved["fp32_flat_groups"], masters
    assert alive.data_ptr() == p.data_ptr() and vars(alive) == vars(p)
    assert_same(copy.deepcopy(saved)["fp32_flat_groups"], masters)


# --- The table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A layout, what happens to it, and what is true of our engine's memory then.

    `dtype` is that of the gradients of the step; of ZeRO-3 `shared` says whether it has weights,
    and gradients, once.  `event` None stands for `train_and_write`.
    """

    config: dict
    dtype: torch.dtype | None = None
    shared: tuple = ()
    event: object = None
    is_slow: bool = False


def slow(*settings):
    return Case(*settings, is_slow=True)


ZERO2, ZERO3 = (config(stage, dtype={}) | CLIP for stage in (2, 3))
UNCLIPPED = {"gradient_clipping": 0.0}
NO_OFFLOAD = config(2, offload=None, dtype={}) | CLIP
SHARED = config(3, **MASTERS) | CLIP
OFFLOADED = config(3, **MASTERS, zero=SMALL | ON_CPU) | CLIP
SPLIT = config(3, **MASTERS, zero=SMALL) | CLIP | GAS
CORRECTED = {**MASTERS, "weight_correction_bits": 8}
CASES = {
    "zero2": Case(ZERO2, BF16),
    "zero2, summed in fp32": Case(ZERO2 | GAS | FP32_GRADS, FP32),
    "zero2, fp16": Case(config(2) | CLIP | HALF, FP16),
    "zero2, fp32 without clipping": Case(config(2), FP32),
    "zero2, 24-bit masters": Case(config(2, **CORRECTED) | CLIP, BF16),
    "zero2, NaN taken": Case(config(2, dtype=UNCHECKED), BF16),
    "zero3": Case(ZERO3, BF16, (False, True)),
    "zero3, sub-groups, accumulated": Case(
        config(3, dtype={}, zero=SMALL) | CLIP | GAS, BF16, (False, False)
    ),
    "zero3, bf16 masters": Case(SHARED, BF16, (True, True)),
    "zero1": slow(config(1, dtype={}) | CLIP, BF16),
    "zero2, dynamic, Lion": slow(
        config(2, dtype={}, codec="dynamic", optimizer="Lion8bitBlockwise") | CLIP, BF16
    ),
    "zero2, bf16 masters": slow(config(2, **MASTERS) | CLIP, BF16),
    "zero2, no offload": slow(NO_OFFLOAD),
    "zero3, fp16": slow(config(3) | CLIP | HALF, FP16, (False, True)),
    "zero3, fp32 throughout": slow(config(3, zero=ON_CPU), FP32, (True, True)),
    "zero3, 24-bit masters": slow(config(3, **CORRECTED) | CLIP, BF16, (True, True)),
    "zero3, bf16 masters, weights offloaded": slow(OFFLOADED, BF16, (True, True)),
    "zero3, bf16 masters, accumulated": slow(SPLIT, BF16, (True, False)),
    "zero2, idle": Case(ZERO2, event=AT_TIMES),
    "zero2, no offload, idle": Case(NO_OFFLOAD, event=AT_TIMES, is_slow=True),
    "zero2, fp16, idle": Case(config(2) | HALF, event=AFTER_OVERFLOW, is_slow=True),
    "zero2, accumulated, idle": Case(ZERO2 | GAS, event=FIRST_UNUSED, is_slow=True),
    "zero3, idle": Case(ZERO3, event=AT_TIMES),
    "zero3, fp16, idle": Case(config(3) | HALF | CLIP, event=AFTER_OVERFLOW),
    "zero3, accumulated, idle last": Case(SHARED | GAS, event=LAST_UNUSED, is_slow=True),
    "zero3, accumulated, idle": Case(SHARED | GAS, event=FIRST_UNUSED),
    "zero2, full": Case(ZERO2, FP32, (), write(write_full)),
    "zero2, vectorized": Case(ZERO2, FP32, (), write(write_vectorized)),
    "zero2, hook": Case(ZERO2 | UNCLIPPED, FP32, (), divide_in_hook),
    "zero2, hook after the step": Case(ZERO2, BF16, (), halve_in_hook),
    "zero3, full": Case(ZERO3, FP32, (False, False), write(write_full)),
    "zero3, vectorized": Case(ZERO3, FP32, (False, False), write(write_vectorized)),
    "zero3, local": Case(ZERO3, FP32, (False, False), write(write_local)),
    "zero3, partitions": Case(ZERO3, FP32, (False, False), write(write_partitions)),
    "zero3, hook": Case(ZERO3 | UNCLIPPED, FP32, (False, False), divide_in_hook),
    "zero3, hook after the step": Case(ZERO3, BF16, (False, True), halve_in_hook),
    "zero3, moved": Case(SHARED, BF16, (False, True), move_weights),
    "zero3, more micro-batches": Case(SHARED, BF16, (True, False), accumulate),
    "zero3, between backwards": Case(SHARED, BF16, (True, False), write_between),
    "zero3, weights written": Case(OFFLOADED, BF16, (True, True), write_weights),
    "zero3, copied": Case(ZERO3, BF16, (False, True), copy_state_dict),
}


# --- Running it ----------------------------------------------------------------------------------


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


def dtype_of(engine):
    """Return the dtype of the gradients of the step, None if there are none."""
    (dtype,) = {p.grad.dtype if p.grad is not None else None for p in masters_of(engine.optimizer)}
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


def train_and_write(engine, name, drops):
    """Train, with a NaN on one rank, and write to the masters between two steps.

    `drops` says whether to set the corrections of these masters to 0, as a step does by itself.
    Returns whether the step has multiplied gradients, and in which it has written weights.
    """
    optimizer, factors, asked = base_optimizer(engine), [], set()
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
        assert not optimizer.copies and are_rounded(engine)
    # DeepSpeed has skipped each copy that the step had written.
    buffers = getattr(engine.optimizer, BUFFERS, [])
    assert all(getattr(buffer, "written_from", None) is None for buffer in buffers)
    return any(factor != 1.0 for factor in factors), asked


@each(CASES, [name for name, case in CASES.items() if case.is_slow])
@on_ranks(2)
def test_engine_without_passes_and_copies_holds_the_bits_of_one_with_them(name):
    case = CASES[name]
    # DeepSpeed fails to move the frozen weights of a Bag.
    model = {move_weights: lambda: None}.get(case.event, Idle if "idle" in name else Bag)
    engines = ours, theirs = pair(case.config, model)
    if case.event:
        for engine in engines:
            case.event(engine)
    else:
        is_offloaded = "offload_optimizer" in case.config["zero_optimization"]
        is_16_bit = bool({"bf16", "fp16"} & case.config.keys())
        # DeepSpeed makes the first copy, and the one after a write from outside.
        skipped = {0, WRITTEN} | ({2} if not {"NaN", "summed"} & set(name.split()) else set())
        copied = is_offloaded and is_16_bit and case.shared[:1] != (True,)
        is_scaled = case.config["gradient_clipping"] > 0 or "fp16" in case.config
        expected = is_scaled, set(range(STEPS)) - skipped if copied else set()
        assert train_and_write(ours, name, drops=False) == expected
        assert train_and_write(theirs, name, drops=True) == (False, set())
    assert_same(*map(held, engines))
    if "idle" not in name:
        assert (dtype_of(ours), is_shared(ours)) == (case.dtype, case.shared)


def test_widen_keeps_values_that_arrive_tells_why_once_and_refreshes_views():
    """A gradient of 1.5 is on its way from a GPU."""
    p = torch.zeros(3, requires_grad=True)
    p.grad, refreshed = torch.zeros(3), []
    zero = SimpleNamespace(
        single_partition_of_fp32_groups=[p],
        _wait_for_offload_copies=lambda: p.grad.fill_(1.5),
        _get_offload_gradient_dict=lambda: refreshed.append(p.grad.dtype),
    )
    gradients._narrow(p, BF16)
    with warned() as lines:
        for _ in range(2):
            gradients.widen(zero, "of a test")
    assert p.grad.tolist() == [1.5] * 3 and p.grad.dtype == FP32
    assert refreshed == [FP32]
    assert len(lines) == 1 and lines[0].endswith("take more: of a test")
