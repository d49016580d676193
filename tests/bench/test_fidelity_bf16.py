# SPDX-License-Identifier: Apache-2.0
"""Bfloat16 weights in the fidelity measurement: ulps, the replay and the closed loop."""

import json

import pytest
import torch

from benchmarks.fidelity.bf16 import (
    ROUNDINGS,
    Bf16Model,
    final_loss_bf16,
    weight_distances,
)
from benchmarks.fidelity.losses import FP32, final_loss
from benchmarks.fidelity.metrics import bf16_ulp, weight_distance
from benchmarks.fidelity.text import TextTask
from benchmarks.fidelity.training import Recipe, TrainingRun
from examples.gpt.model import GPTConfig
from zero8.state.keywords import ROUNDINGS as SETTINGS
from zero8.state.keywords import check_rounding

TINY = Recipe(
    steps=6,
    beta2=0.999,
    task=TextTask(GPTConfig(context=64, width=64, layers=1, heads=2), window=16, batch_size=2),
)


@pytest.mark.parametrize(
    ("x", "ulp"),
    [
        (-1.0, 2.0**-7),
        (1.99, 2.0**-7),
        (2.0**-130, 2.0**-133),
        (0.0, 2.0**-133),
    ],
)
def test_bf16_ulp_of_known_values_is_the_step_to_the_next_bfloat16(x, ulp):
    assert bf16_ulp(torch.tensor([x])).item() == ulp


def test_bf16_ulp_of_every_normal_bfloat16_is_the_step_to_the_next():
    bits = torch.arange(0x0080, 0x7F7F, dtype=torch.int16)
    x, following = bits.view(torch.bfloat16), (bits + 1).view(torch.bfloat16)
    assert torch.equal(bf16_ulp(x.float()), following.double() - x.double())


def test_weight_distance_of_known_weights():
    reference = torch.tensor([1.0, 1.0, 2.0, 0.0, 0.0])
    weights = torch.tensor([1.0, 1.0 + 3 * 2.0**-7, 2.0 - 2.0**-7, 0.0, 1.0])
    found = weight_distance(weights, reference)
    # 0, 3, 0.5 (ulps of 2, the larger), 0, and 128 for a weight that should be 0.
    assert found["median_ulps"] == 0.5
    assert found["max_ulps"] == found["p999_ulps"] == 128
    assert found["rms_ulps"] == pytest.approx(((9 + 0.25 + 128**2) / 5) ** 0.5)


def test_roundings_are_all_that_the_optimizer_offers():
    measured = {
        check_rounding(settings["stochastic_rounding"])
        for settings in ROUNDINGS.values()
        if "stochastic_rounding" in settings
    }
    assert measured == set(SETTINGS.values())


def test_weight_distances_on_one_run_are_smallest_with_corrections():
    ticks = []
    rows = {row["weights"]: row for row in weight_distances(TINY, lambda: ticks.append(1))}
    assert len(ticks) == TINY.steps
    assert list(rows) == [*ROUNDINGS, "corrected, with its 8 bits"]
    shares = {name: row["share_of_way"] for name, row in rows.items()}
    whole = shares.pop("corrected, with its 8 bits")
    assert whole < 0.1 * shares["corrected"]
    assert shares["corrected"] == min(shares.values())
    json.dumps(rows, allow_nan=False)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_bf16_model_after_a_step_computes_with_bfloat16_values(rounding):
    run = TrainingRun(TINY)
    before = [p.detach().clone() for p in run.model.parameters()]
    model = Bf16Model(run.model, TINY, rounding)
    run.backward(0)
    run.update(model, 5)
    after = [p.detach() for p in run.model.parameters()]
    assert all(torch.equal(p, p.bfloat16().float()) for p in after)
    assert any(not torch.equal(p, q.bfloat16().float()) for p, q in zip(after, before, strict=True))


def test_final_loss_on_bf16_weights_is_near_that_of_fp32():
    fp32 = final_loss(TINY, FP32, lambda: None)
    losses = [final_loss_bf16(TINY, rounding, lambda: None) for rounding in ROUNDINGS]
    assert len(set(losses)) == len(losses)
    assert losses == pytest.approx([fp32] * len(losses), rel=0.01)
