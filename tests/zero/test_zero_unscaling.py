# SPDX-License-Identifier: Apache-2.0
"""Clipping and unscaling inside the step have the bits of DeepSpeed's pass over the gradients."""

import inspect
from types import MethodType, SimpleNamespace

import pytest
import torch
from nests import difference
from zero_worker import Bag, base_optimizer, config, held, pair, pattern, take_step

from zero8.deepspeed import step as steps

UNSCALES = "unscale_and_clip_grads"
STEPS = 3
CLIP = {"gradient_clipping": 0.5}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
BF16_MASTERS = {"bf16_master_weights_and_grads": True}
FUSED = {
    "zero1, clipped": config(stage=1) | CLIP,
    "zero2, clipped": config(stage=2) | CLIP,
    "zero2, clipped, Lion": config(stage=2, optimizer="Lion8bitBlockwise") | CLIP,
    "zero2, bf16 masters, clipped": config(stage=2, dtype=BF16_MASTERS) | CLIP,
    "zero2, fp16, scaled": config(stage=2) | FP16,
    "zero2, fp16, scaled and clipped": config(stage=2) | FP16 | CLIP,
    "zero2, no offload, clipped": config(stage=2, offload=None) | CLIP,
    "zero3, clipped": config(stage=3) | CLIP,
    "zero3, sub-groups, clipped": config(stage=3, zero={"sub_group_size": 5000}) | CLIP,
    "zero3, bf16 masters, clipped": config(stage=3, dtype=BF16_MASTERS) | CLIP,
    "zero3, fp16, scaled and clipped": config(stage=3) | FP16 | CLIP,
}
WITHOUT_A_FACTOR = {"zero2, neither": config(stage=2)}


def fused_and_not(ds_config, model):
    """Return an engine, and one with DeepSpeed's own method and its own memory for gradients."""
    fused, unfused = pair(ds_config, model)
    zero = unfused.optimizer
    own = inspect.unwrap(getattr(type(zero), UNSCALES))
    setattr(zero, UNSCALES, MethodType(own, zero))
    return fused, unfused


def steps_with_factors(engine):
    """Take steps; return the factors that the optimizer was given."""
    optimizer, factors = base_optimizer(engine), []
    scale_grads = optimizer.scale_grads

    def noted(factor):
        factors.append(float(factor))
        scale_grads(factor)

    optimizer.scale_grads = noted
    for step in range(STEPS):
        take_step(engine, step)
    del optimizer.scale_grads
    return factors


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
GAS = {"gradient_accumulation_steps": 2}
IDLE = {
    "zero1, clipped": (config(stage=1, dtype={}) | CLIP, "idle"),
    "zero2, clipped": (config(stage=2, dtype={}) | CLIP, "idle"),
    "zero2, no offload, clipped": (config(stage=2, offload=None, dtype={}) | CLIP, "idle"),
    "zero2, fp16": (config(stage=2) | FP16, "idle after an overflow"),
    "zero2, bf16 masters, accumulated": (
        config(stage=2, dtype=BF16_MASTERS) | CLIP | GAS,
        "idle in the first micro-batch",
    ),
    "zero2, accumulated": (
        config(stage=2, dtype={}) | CLIP | GAS,
        "idle in the first micro-batch",
    ),
    "zero3, clipped": (config(stage=3, dtype={}) | CLIP, "idle"),
    "zero3, fp16": (config(stage=3) | FP16 | CLIP, "idle after an overflow"),
    "zero3, bf16 masters, idle at last": (
        config(stage=3, dtype=BF16_MASTERS) | CLIP | GAS,
        "idle in the last micro-batch",
    ),
    "zero3, bf16 masters, accumulated": (
        config(stage=3, dtype=BF16_MASTERS) | CLIP | GAS,
        "idle in the first micro-batch",
    ),
}


def train_idle(engine, uses):
    for step, use in enumerate(uses):
        engine.backward(engine(step, *use))
        engine.step()
    return held(engine)


def idle_pairs(layouts):
    """Return, by layout, what fused and unfused engines hold after steps that use not all."""
    return {
        name: [train_idle(engine, USES[uses]) for engine in fused_and_not(ds_config, Idle)]
        for name, (ds_config, uses) in layouts.items()
    }


def step_pairs(layouts):
    """Return, by layout, what fused and unfused engines hold, and the factors of both."""
    result = {}
    for name, ds_config in layouts.items():
        engines = fused_and_not(ds_config, Bag)
        factors = [steps_with_factors(engine) for engine in engines]
        result[name] = *map(held, engines), *factors
    return result


@pytest.fixture(scope="module")
def pairs(standing_ranks):
    return standing_ranks(2).run(step_pairs, timeout_s=300, layouts=FUSED | WITHOUT_A_FACTOR)


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.slow)],
    ids=["one rank", "two ranks"],
)
def idle(request, standing_ranks):
    return standing_ranks(request.param).run(idle_pairs, timeout_s=300, layouts=IDLE)


@pytest.mark.parametrize("name", IDLE)
def test_gradient_that_is_used_again_has_been_multiplied_each_time(idle, name):
    """DeepSpeed does not clear the buffer of a parameter that gets no gradient."""
    for rank in idle:
        fused, plain = rank[name]
        assert difference(fused, plain) == ""


@pytest.mark.parametrize("name", FUSED)
def test_factor_in_the_step_equals_a_pass_over_the_gradients(pairs, name):
    for rank in pairs:
        fused, plain, factors, no_factors = rank[name]
        assert difference(fused, plain) == ""
        assert len(factors) >= STEPS and any(factor != 1.0 for factor in factors)
        assert no_factors == []


@pytest.mark.parametrize("name", WITHOUT_A_FACTOR)
def test_step_without_clipping_or_loss_scale_has_no_factor(pairs, name):
    for rank in pairs:
        fused, plain, *factors = rank[name]
        assert difference(fused, plain) == ""
        assert factors == [[], []]


@pytest.mark.parametrize("patch", [steps.unscale12, steps.unscale3])
@pytest.mark.parametrize("case", ["ours", "GPU", "autocast scaler", "NVMe"])
def test_unscaling_is_left_to_our_step_on_the_cpu_only(patch, case):
    grad = torch.ones(3, device="meta" if case == "GPU" else "cpu")
    factors, left = [], []
    zero = SimpleNamespace(
        optimizer=SimpleNamespace(scale_grads=factors.append),
        fp32_partitioned_groups_flat=[SimpleNamespace(grad=grad)],
        torch_autocast_gradscaler=object() if case == "autocast scaler" else None,
        swap_optimizer=case == "NVMe",
        cpu_offload=False,
        offload_optimizer=False,
        clip_grad=0.0,
        loss_scale=4.0,
    )
    patch(lambda *args: left.append(args), zero, [grad] if patch is steps.unscale12 else 0, 1.0)
    is_left = case != "ours" and (case, patch) != ("NVMe", steps.unscale12)
    assert (factors, len(left)) == (([], 1) if is_left else ([0.25], 0))
    assert is_left or grad.tolist() == [1.0] * 3
