# SPDX-License-Identifier: Apache-2.0
"""The measurement of SGD's, Lion's and AdEMAMix's moments: its errors, counts, bound, and files."""

import json
import math

import pytest
import torch

from benchmarks.fidelity.images import ImageTask
from benchmarks.fidelity.schemes import FP32_CONTROL, Shadow
from benchmarks.fidelity.text import TextTask
from benchmarks.fidelity.training import Layout, Recipe
from benchmarks.momentum import averages as averages_module
from benchmarks.momentum import command
from benchmarks.momentum.adam import adam
from benchmarks.momentum.averages import (
    LEAST_ERROR,
    Averages,
    RunBound,
    SettlingAverage,
    averages,
    bound,
    first_moments,
)
from benchmarks.momentum.losses import SETTINGS, final_loss, rows_of
from benchmarks.momentum.recorded import sgd
from benchmarks.momentum.signs import WrongSigns, signs
from examples.gpt.model import GPTConfig

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LAYOUT = Layout(("a", "b"), ((64, 128), (128, 64)))
TINY = Recipe(
    steps=4,
    beta2=0.95,
    task=TextTask(GPTConfig(context=64, width=64, layers=1, heads=2), window=16, batch_size=2),
)


def gradients(steps):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(LAYOUT.numel, generator=generator) for _ in range(steps)]


# --- A moving average ----------------------------------------------------------------------------


def test_average_in_float32_against_float32_has_no_error(monkeypatch):
    monkeypatch.setattr(averages_module, "STATES", (FP32_CONTROL, "dynamic"))
    compared = Averages(LAYOUT, 0.9)
    for grad in gradients(3):
        compared.take(grad, counts=True)
    fp32, dynamic, _ = compared.rows()
    assert fp32["rms_error"] == fp32["drift"] == fp32["error_over_dynamic"] == 0
    assert dynamic["rms_error"] > 0 and dynamic["error_over_dynamic"] == 1


def test_update_of_sgd_is_the_average_over_1_minus_beta():
    shadow = Shadow(sgd(FP32_CONTROL), LAYOUT, (0.9, 0.9))
    average = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for grad in gradients(3):
        average = 0.9 * average + 0.1 * grad.double()
        update = shadow.update(grad)
    assert torch.allclose(update.double(), average / 0.1, atol=1e-5)
    assert torch.equal(first_moments(shadow), update)


def test_settling_average_of_a_constant_gradient_is_exact_at_first():
    average, ones = SettlingAverage(LAYOUT, 0.5), torch.ones(LAYOUT.numel)
    for expected in (1.0, 1.5, 1.75):
        assert torch.allclose(average.update(ones), expected * ones)


def test_bound_of_a_long_run_of_one_size_is_the_bound_without_end():
    found = RunBound(0.9)
    for step in range(200):
        found.take(torch.ones(4), counts=step >= 100)
    assert found.rms == pytest.approx(bound(0.9), rel=1e-6)
    assert bound(0.9) == pytest.approx(0.006443 * 0.9 / math.sqrt(0.19), rel=1e-3)


def test_bound_of_a_second_step_is_one_rounding_decayed_once():
    found = RunBound(0.5)
    found.take(torch.ones(4), counts=False)
    found.take(torch.full((4,), 2.0), counts=True)
    assert found.rms == pytest.approx(LEAST_ERROR * 0.5 / 2)


# --- Signs ---------------------------------------------------------------------------------------


def test_wrong_signs_are_counted_alike_and_by_the_size_of_directions():
    count = WrongSigns()
    direction = torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0])
    count.compare(torch.tensor([1.0, 1.0, 0.0, -1.0, 1.0]), direction)
    assert count.shares() == {"wrong_share": 2 / 4, "wrong_share_by_size": 5 / 10}
    count.compare(direction.sign(), direction)
    assert count.shares() == {"wrong_share": 2 / 8, "wrong_share_by_size": 5 / 20}


# --- Trainings -----------------------------------------------------------------------------------


def test_loss_rows_compare_the_mean_with_the_range_of_float32():
    losses = {FP32_CONTROL: [1.0, 2.0, 1.5, 1.5, 1.5], "log": [1.9] * 5, "dynamic": [2.5] * 5}
    fp32, log, dynamic = rows_of(SETTINGS[0], range(1, 6), losses)
    assert (fp32["val_loss_lowest"], fp32["val_loss_highest"]) == (1.0, 2.0)
    assert log["mean_within_fp32s_range"] and not dynamic["mean_within_fp32s_range"]
    assert log["difference_mean"] == pytest.approx(0.4)
    assert log["difference_std"] == pytest.approx(math.sqrt(0.5 / 4))
    assert log["difference_standard_error"] == pytest.approx(math.sqrt(0.5 / 4 / 5))


@pytest.mark.parametrize(("optimizer", "lr"), [("Lion", 1e-3), ("SGD", 0.3), ("AdEMAMix", 3e-3)])
def test_final_loss_of_a_small_run_in_8_bits_is_close_to_float32s(optimizer, lr):
    recipe = Recipe(steps=4, beta2=0.99, task=ImageTask(batch_size=8), peak_lr=lr)
    fp32, again, log = (
        final_loss(recipe, optimizer, states, lambda: None)
        for states in (FP32_CONTROL, FP32_CONTROL, "log")
    )
    assert fp32 == again
    assert log != fp32 and log == pytest.approx(fp32, rel=0.01)


# --- The command ---------------------------------------------------------------------------------


def small_results(jobs, *, workers, label):
    """Stands for run_jobs: replays of a small model, and made-up losses."""
    replays = {averages, signs, adam}
    return {
        job: job.function(TINY, lambda: None)
        if job.function in replays
        else 2.0 + 0.01 * job.arguments[0].seed
        for job in jobs
    }


def test_command_writes_all_parts_as_json_and_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "run_jobs", small_results)
    out = tmp_path / "new" / "momentum.json"
    assert command.main(["--json", str(out)]) == 0
    result = json.loads(out.read_text())
    counts = {key: len(result[key]) for key in ("averages", "signs", "adam", "losses")}
    assert counts == {"averages": 9, "signs": 4, "adam": 4, "losses": 18}
    for row in result["averages"]:
        assert 0 < row["rms_error"] < 0.2 and 0 < row["bound_of_run"] < row["bound"]
    for row in result["signs"]:
        assert 0 <= row["wrong_share_by_size"] < row["wrong_share"] < 0.1
    table = out.with_suffix(".md").read_text()
    for heading in ("A moving average", "Lion", "Adam", "Validation losses"):
        assert f"## {heading}\n" in table
    assert f"| text | Lion | {FP32_CONTROL} | 2.0300 | 2.0100 | 2.0500 | +0.0000" in table
    assert str(out) in capsys.readouterr().out


def test_command_with_losses_only_trains_these_settings_with_these_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "run_jobs", small_results)
    out = tmp_path / "lion.json"
    options = ["--losses", "convolutions/Lion", "--seeds", "3", "--first-seed", "6"]
    assert command.main([*options, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result.keys().isdisjoint({"averages", "signs", "adam", "steps"})
    assert [(row["task"], row["optimizer"], row["seeds"]) for row in result["losses"]] == [
        ("convolutions", "Lion", [6, 7, 8])
    ] * 3
    assert result["command"] == f"python -m benchmarks.momentum {' '.join(options)} --json {out}"
    table = out.with_suffix(".md").read_text()
    assert table.startswith("# Final losses with moments in 8 bits\n")
    assert f"| convolutions | Lion | {FP32_CONTROL} | 2.0700 | 2.0600 | 2.0800 |" in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--losses", "text/Adam"], "--losses: invalid choice: 'text/Adam'"),
        (["--seeds", "1"], "--seeds: got 1, expected at least 2"),
        (["--first-seed", "-1"], "--first-seed: got -1, expected at least 0"),
    ],
)
def test_command_option_that_is_invalid_is_refused(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit):
        command.main([*options, "--json", str(tmp_path / "out.json")])
    assert message in capsys.readouterr().err
