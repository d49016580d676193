# SPDX-License-Identifier: Apache-2.0
"""The measurement of INT8 weights, in few steps."""

import pytest
import torch

pytest.importorskip("torchao")

from benchmarks.fidelity.pool import cores
from benchmarks.fidelity.training import Recipe, TrainingRun
from benchmarks.int8_weights import command, losses, steps
from benchmarks.int8_weights.kinds import FLOAT32, KINDS, Weights, decoded, int8
from benchmarks.int8_weights.losses import KeptModel
from benchmarks.int8_weights.replay import distances

pytestmark = pytest.mark.integrations


def recipe(num_steps):
    return Recipe(num_steps, losses.BETA2, peak_lr=1e-3)


def test_distances_of_every_way_are_those_of_roundings_and_0_of_float32():
    """Small updates are lost to nearest in INT8, whose codes are wider than those of bfloat16."""
    rows = {row["weights"]: row for row in distances(recipe(30), lambda: None)}
    assert list(rows) == list(KINDS)
    assert rows[FLOAT32]["distance_over_way"] == 0 and rows[FLOAT32]["share_in_direction"] == 1
    assert all(row["distance_over_way"] > 0 for name, row in rows.items() if name != FLOAT32)
    dither, nearest = rows["INT8, dither"], rows["INT8, nearest"]
    assert abs(dither["share_in_direction"] - 1) < abs(nearest["share_in_direction"] - 1)


def test_weights_of_a_kept_model_are_those_of_its_linear_layers_and_int8_values():
    run = TrainingRun(recipe(1))
    before = run.model.token_embedding.weight.detach().clone()
    KeptModel(run.model, run.recipe, "INT8, dither")
    weight = run.model.blocks[0].mlp[0].weight.detach()
    assert torch.equal(decoded(int8(weight)), weight)
    assert torch.equal(run.model.token_embedding.weight, before)


def test_weights_that_are_kept_begin_at_the_nearest_values():
    matrices = {"one": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}
    for name in KINDS:
        (values,) = Weights(name, matrices, recipe(1)).values()
        bound = matrices["one"].abs().amax(1, keepdim=True) / 127 / 2 * 1.01
        assert ((values - matrices["one"]).abs() <= bound).all(), name


def test_report_of_the_measurement_has_a_row_for_every_way(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "REPLAYED_STEPS", 2)
    monkeypatch.setattr(losses, "STEPS", 2)
    monkeypatch.setattr(losses, "SEEDS", (1, 2))
    assert command.main(["--json", str(tmp_path / "out.json")]) == 0
    text = (tmp_path / "out.md").read_text()
    for name in KINDS:
        assert text.count(f"| {name} |") == len(command.PEAK_LRS) + 1


def test_report_of_steps_has_a_row_for_every_kind_and_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "SHAPE", (64, 128))
    monkeypatch.setattr(steps, "ROUNDS", 6)
    assert steps.main(["--json", str(tmp_path / "out.json")]) == 0
    text = (tmp_path / "out.md").read_text()
    counts = len({1, cores()})
    assert text.startswith("# Steps of INT8 weights\n")
    for name in (*steps.ZERO8, steps.TORCHAO):
        assert text.count(f"| {name} |") == counts
