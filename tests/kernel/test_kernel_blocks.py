# SPDX-License-Identifier: Apache-2.0
"""What the compiled step promises about blocks: shards, non-finite gradients, bounds, refusals."""

import itertools
import math
import random
from fractions import Fraction

import kernel_steps
import numpy as np
import pytest
import torch
from segments import (
    CODEC_NAMES,
    Place,
    assert_same,
    assert_steps_inside,
    copied,
    gradient,
    make,
    poison_moment,
    scalars_at,
    tensors_by_element,
)

from zero8.op import kernel
from zero8.spec import reference
from zero8.spec.adam import ADAM, next_history

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16 = torch.float32, torch.bfloat16
codec_names = pytest.mark.parametrize("codec", CODEC_NAMES, ids=lambda name: name or "fp32")
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
WHOLE = Place((7, 700), 256, 0, 7 * 700)

# --- Shards --------------------------------------------------------------------------------------


@codec_names
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_kernel_step_writes_nothing_beside_its_segment(codec, dtype, steppers):
    """Neighbours in the same buffers belong to other threads: 100 elements on both sides."""
    places = [Place((3, 300), 256, 299, numel) for numel in (1, 15, 17, 63, 255)]
    places += [Place((3, 300), 256, 296, numel) for numel in (7, 8, 9, 31)]
    for place in [*places, Place((60, 5), 256, 0, 300)]:
        segment = make(codec, place, scalars_at(1, ADAMW), dtype)
        segment.grad.copy_(gradient(0, place.numel, seed=place.numel))
        assert_steps_inside(segment, kernel_steps.step, steppers, str(place))


# --- Non-finite gradients ------------------------------------------------------------------------

POISON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "1e30": 1e30, "-2^63": -(2.0**63)}


@codec_names
@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
@pytest.mark.parametrize("grad_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["baseline", "fastest", "cuda"])
def test_kernel_step_nonfinite_gradient_leaves_its_block_as_it_was(
    codec, poison, grad_dtype, name, steppers
):
    """Blocks without it step as if it were not there; the reference does the same."""
    step = steppers[list(kernel.isas())[-1] if name == "fastest" else name]
    place = Place((5, 300), 256, 20, 1400)
    clean = make(codec, place, scalars_at(2, ADAMW), FP32, grad_dtype)
    clean.grad.copy_(gradient(0, place.numel, seed=1))
    kernel_steps.step([clean])
    poisoned, before = copied(clean), copied(clean)
    # Elements of two blocks, one of them at its last element, of different rows with a codec.
    bad = [399, 1000, 1001]
    for element in bad:
        poisoned.grad[element] = poison
    following = copied(poisoned)
    block, _ = clean.grid.block_numbers(place.first, place.numel)
    bad_blocks = block[bad].unique()
    assert bad_blocks.numel() == 2

    assert step([clean, poisoned]) == [0, 2]
    good = ~torch.isin(block, bad_blocks)
    good_blocks = ~torch.isin(block.unique(), bad_blocks)
    for key, value in tensors_by_element(poisoned).items():
        mask = good_blocks if key.endswith("scale") else good
        assert torch.equal(value[mask], tensors_by_element(clean)[key][mask]), key
        assert torch.equal(value[~mask], tensors_by_element(before)[key][~mask]), key
    assert not torch.equal(poisoned.param[good], before.param[good])
    assert reference.step(following) == 2
    assert_same(poisoned, following, name)


@codec_names
@pytest.mark.parametrize("name", [*kernel.isas(), "cuda"])
def test_kernel_step_moment_that_is_no_number_leaves_its_block_as_it_was(codec, name, steppers):
    """Nothing that a load lets through, but a state can be put in place by hand."""
    place = Place((6, 300), 256, 0, 1800)
    clean = make(codec, place, scalars_at(2, ADAMW))
    clean.grad.copy_(gradient(0, place.numel, seed=1))
    kernel_steps.step([clean])
    for poison, which in itertools.product((math.nan, math.inf, -1.0), ("exp_avg", "exp_avg_sq")):
        poisoned = copied(clean)
        bad_block = poison_moment(poisoned, which, poison)
        before, following = copied(poisoned), copied(poisoned)
        is_bad = (which, poison) != ("exp_avg", -1.0)  # that is a number
        assert steppers[name]([poisoned]) == [int(is_bad)]
        assert reference.step(following) == is_bad
        assert_same(poisoned, following, f"{which} of {poison}")
        block, _ = poisoned.grid.block_numbers(0, place.numel)
        left = block == bad_block
        assert torch.equal(poisoned.param[left], before.param[left]) == is_bad
        assert poisoned.param.isfinite().all()


def test_kernel_step_nonfinite_counts_are_exact_over_threads():
    place = Place((40, 64), 64, 0, 40 * 64)
    segments = [make("log", place, scalars_at(1, ADAMW)) for _ in range(4)]
    for number, segment in enumerate(segments):
        segment.grad.view(40, 64)[: 10 * number, number] = math.nan
    assert kernel_steps.step(segments, num_threads=5) == [0, 10, 20, 30]


# --- Flush to zero -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("flush", [False, True], ids=["kept", "flushed"])
def test_kernel_step_restores_the_threads_treatment_of_subnormals(flush, num_threads):
    segment = make("log", WHOLE, scalars_at(1, ADAMW))
    segment.grad.fill_(1.0)
    smallest = torch.full((4,), 2.0**-126)
    torch.set_flush_denormal(flush)
    try:
        kernel_steps.step([segment], num_threads=num_threads)
        flushed_after = bool((smallest * 0.5 == 0).all())
    finally:
        torch.set_flush_denormal(False)
    assert flushed_after == flush


# --- The bound on the update ---------------------------------------------------------------------


def test_next_history_varying_betas_is_the_cauchy_schwarz_bound():
    """K = sum a_i^2/b_i, where m = sum a_i g_i and v = sum b_i g_i^2, in exact numbers.

    All terms are positive and a step of the recurrence rounds at most 8 times, so t steps are
    within 8 t roundings of 2^-53.
    """
    rng = random.Random(4)
    a, b, history = [], [], 0.0
    for t in range(1, 60):
        betas = rng.uniform(0, 0.99), rng.uniform(0.5, 0.9999)
        beta1, beta2 = map(Fraction, betas)
        a = [beta1 * x for x in a] + [1 - beta1]
        b = [beta2 * x for x in b] + [1 - beta2]
        exact = sum(x * x / y for x, y in zip(a, b, strict=True))
        history = next_history(history, *betas)
        assert abs(Fraction(history) - exact) <= exact * 8 * t / 2**53
        # Attained by g_i = a_i/b_i, so no smaller bound would do.
        g = [x / y for x, y in zip(a, b, strict=True)]
        m = sum(x * y for x, y in zip(a, g, strict=True))
        v = sum(x * y * y for x, y in zip(b, g, strict=True))
        assert m * m == exact * v


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.8, 0.6), (0.0, 0.5)])
def test_largest_update_at_any_step_stays_below_the_exact_bound(betas):
    """max_ratio and step_size are rounded to float32, and so is their product in the kernel."""
    history = 0.0
    for step in range(1, 2000):
        history = next_history(history, *betas)
        group = {**ADAM.options, "lr": 1.0, "betas": betas}
        scalars = ADAM.scalars(step, (history,), group, True)
        largest = float(np.float32(scalars.step_size) * np.float32(scalars.max_ratio))
        bound = math.sqrt(history * (1 - betas[1] ** step)) / (1 - betas[0] ** step)
        assert bound * (1 - 2.0**-21) < largest < bound


# --- Refusals ------------------------------------------------------------------------------------


def test_kernel_step_isa_of_the_environment_is_used_or_refused(monkeypatch):
    monkeypatch.setenv("ZERO8_ISA", "")
    assert kernel.default_isa() == list(kernel.isas())[-1]
    monkeypatch.setenv("ZERO8_ISA", "baseline")
    assert kernel.default_isa() == "baseline"
    monkeypatch.setenv("ZERO8_ISA", "mmx")
    with pytest.raises(ValueError, match="ZERO8_ISA: got 'mmx', this processor has .*'baseline'"):
        kernel.CpuKernel()
