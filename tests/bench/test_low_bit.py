# SPDX-License-Identifier: Apache-2.0
"""Rounding of small updates and of averaged gradients, memory by kind of states, and the files."""

import json
import math
from dataclasses import replace

import pytest
import torch

from benchmarks.fidelity.training import Recipe, TrainingRun
from benchmarks.low_bit import command
from benchmarks.low_bit.averages import averages
from benchmarks.low_bit.linear import THRESHOLDS, codes_of, golden, independent
from benchmarks.low_bit.losses import EXACT, KINDS, SEEDS, final_loss
from benchmarks.low_bit.lost import FORMATS, STEPS, distances, paths, right_path, walk
from benchmarks.low_bit.memory import STATES, memory
from benchmarks.low_bit.ranks import RANKS, TASK, RankGradients
from benchmarks.low_bit.reduction import LARGEST_CODES, ROUNDINGS, average
from examples.gpt.model import GPTConfig
from zero8 import cli
from zero8.spec import dither
from zero8.spec.grid import BlockGrid

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TINY = replace(TASK, config=GPTConfig(context=64, width=64, layers=1, heads=2))
TINY_RECIPE = Recipe(3, 0.999, task=TINY)
SHARES = (1 / 2, 1 / 8, 1 / 64)
"""Updates in codes."""


# --- Codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-2.75, -0.125, 0.0, 0.3, 1.0, 2.0])
def test_codes_over_all_thresholds_have_the_value_as_their_mean(value):
    """A multiple of 2^-16 is met exactly, another value to less than one threshold, 2^-16."""
    thresholds = torch.arange(THRESHOLDS)
    mean = codes_of(torch.full((THRESHOLDS,), value), 127, thresholds).double().mean().item()
    assert abs(mean - value) < (0 if value * THRESHOLDS % 1 == 0 else 2**-16) + 1e-12


def test_codes_of_the_largest_values_stay_at_any_threshold():
    ends = torch.tensor([-7.0, 7.0])
    for threshold in (0, THRESHOLDS - 1):
        assert torch.equal(codes_of(ends, 7, torch.full((2,), threshold)), ends)


def test_golden_thresholds_are_those_of_the_dither_in_blocks():
    phase, numel = 0xFEDCBA98, 256 * 300
    expected = dither.in_blocks(phase, 0, numel, BlockGrid(1, numel, 256))
    assert torch.equal(golden(phase, numel).flatten(), expected)


def test_independent_thresholds_are_a_function_of_the_seed_and_cover_the_range():
    """1000 of them leave the lowest or the highest hundredth empty with a probability of 9e-5."""
    drawn = independent(5, (1000,))
    assert torch.equal(drawn, independent(5, (1000,)))
    assert not torch.equal(drawn, independent(6, (1000,)))
    assert 0 <= drawn.min() < THRESHOLDS // 100 and 0.99 * THRESHOLDS < drawn.max() < THRESHOLDS


# --- Small updates -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_nearest_with_updates_up_to_half_a_code_loses_all(name):
    """Half a code is a tie, which goes to the even code, and 1 has an even one in both formats."""
    distance = FORMATS[name].distance
    for share in SHARES:
        assert (walk(name, "nearest", share * distance, 4) == 1).all()
    assert (walk(name, "nearest", 0.51 * distance, 1)[-1] == 1 + distance).all()


def test_independent_rounding_of_updates_is_unbiased():
    """A step's error is Bernoulli's with the update f, in codes, as its probability.

    So the RMS is sqrt(n f (1 - f)) after n steps, and the mean of 4096 weights has a 64th of that.
    The bounds are 4 standard errors, which are exceeded with a probability of 6e-5; the RMS has
    one of RMS / sqrt(2 * 4096), and an eighth more where few steps round up.
    """
    for row in distances():
        if row["rounding"] == "independent":
            share = row["update_codes"]
            expected = math.sqrt(STEPS * share * (1 - share))
            assert abs(row["mean_codes"]) < 4 * expected / 64
            assert row["rms_codes"] == pytest.approx(expected, rel=1.125 * 4 / math.sqrt(8192))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("share", SHARES)
def test_dither_in_a_run_of_steps_stays_within_two_codes_of_the_right_path(name, share):
    """Denjoy and Koksma bound the hits of an interval by the golden-ratio sequence.

    Over a Fibonacci number of steps there are at most 2 more or less than the interval's length
    says.  No number below 32 needs more than three of these, as 31 = 21 + 8 + 2, so that 6 codes
    are never exceeded in a run; in these runs 2 codes are not.
    """
    size = share * FORMATS[name].distance, dither.RUN_STEPS - 1
    errors = walk(name, "dither", *size) - right_path(*size)[:, None]
    assert errors.abs().max() <= 2 * FORMATS[name].distance


def test_dither_ends_nearer_to_the_right_path_than_independent_rounding():
    """The four runs of 120 steps begin anywhere, and each adds an RMS error of about 0.5 codes.

    So their sum has an RMS of about 1.  Independent rounding has sqrt(n f (1 - f)): 5.5, 3.6 and
    1.4 codes.
    """
    keys = ("format", "update_codes", "rounding")
    rms = {tuple(row[key] for key in keys): row["rms_codes"] for row in distances()}
    for name in FORMATS:
        for share, most in zip(SHARES, (0.3, 0.3, 0.7), strict=True):
            assert rms[name, share, "dither"] < most * rms[name, share, "independent"]


def test_paths_with_dither_end_beside_the_right_one_and_to_nearest_never_begin():
    """13 runs begin anywhere, and each adds an RMS error of about 0.5 codes: twice their sum."""
    found = paths()
    assert found["right"][-1] == 1 + 400 * 2**-10
    for name, by_rounding in found["formats"].items():
        assert set(by_rounding["nearest"]) == {1.0}
        distance = abs(by_rounding["dither"][-1] - found["right"][-1])
        assert distance < 2 * math.sqrt(13) * 0.5 * FORMATS[name].distance


# --- Memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["log", "log6", "linear4"])
def test_memory_of_a_codec_is_that_of_zero8_plan(codec, capsys):
    words = ["--parameters", "8B", "--engine", "fsdp2", "--offload", "none"]
    assert cli.main(["plan", *words, "--dtype", "bf16-masters", "--codec", codec, "--json"]) == 0
    plan = {row["what"]: row for row in json.loads(capsys.readouterr().out)["memory"]}
    by_kind = {(row["weights"], row["states"]): row for row in memory()["rows"]}
    row = by_kind["bfloat16", codec]
    assert row["weight_bytes"] == plan["weights"]["zero8_bytes"]
    assert row["gradient_bytes"] == plan["gradients"]["zero8_bytes"]
    assert row["state_bytes"] == plan["moments"]["zero8_bytes"]
    assert by_kind["bfloat16", "float32"]["state_bytes"] == plan["moments"]["fp32_bytes"]
    assert not row["not_from_the_plan"]


def test_memory_of_int8_weights_is_that_of_zero8_plan(capsys):
    words = ["--parameters", "8B", "--engine", "fsdp2", "--offload", "none", "--weights", "int8"]
    assert cli.main(["plan", *words, "--dtype", "bf16-masters", "--json"]) == 0
    plan = {row["what"]: row for row in json.loads(capsys.readouterr().out)["memory"]}
    (row,) = (row for row in memory()["rows"] if (row["weights"], row["states"]) == ("INT8", "log"))
    assert row["weight_bytes"] == plan["weights"]["zero8_bytes"]
    assert row["gradient_bytes"] == plan["gradients"]["zero8_bytes"]
    assert not row["not_from_the_plan"]


def test_memory_that_the_plan_does_not_know_is_computed_from_the_shapes():
    found = memory()
    numel = found["parameters"]
    by_kind = {(row["weights"], row["states"]): row for row in found["rows"]}
    assert len(by_kind) == 1 + 2 * len(STATES)
    int8, float32 = by_kind["INT8", "bfloat16"], by_kind["float32", "float32"]
    assert int8["weight_bytes"] == numel + 2 * numel // 4096
    assert int8["state_bytes"] == 4 * numel
    assert int8["not_from_the_plan"] == ["states"]
    parts = ("weight_bytes", "gradient_bytes", "state_bytes")
    assert [float32[part] / numel for part in parts] == [4, 4, 8]


# --- Averages of gradients -----------------------------------------------------------------------


def even_gradients(num_ranks=RANKS, numel=256 * 128):
    """Return gradients with even fractions of a code; the largest of every block is 1."""
    grads = torch.rand(num_ranks, numel, generator=torch.Generator().manual_seed(0)) * 2 - 1
    grads.view(num_ranks, -1, 256)[:, :, 0] = 1
    return grads


RMS_CODES = {
    "nearest": math.sqrt(4 / 12) / 4,
    "independent": math.sqrt(4 / 6) / 4,
    "dither": math.sqrt(4 / 6) / 4,
    "dither, spread over ranks": math.sqrt(4 / 12 + 1 / 12) / 4,
    "dither, subtracted": math.sqrt(4 / 12) / 4,
    "dither, spread and subtracted": math.sqrt(4 / 12) / 4,
}


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_average_of_unlike_gradients_has_the_error_that_is_derived(rounding):
    """The fractions f of the ranks' values are even and independent.

    To nearest and with subtracted thresholds an error is even in a code: its square is 1/12 in the
    mean.  Stochastic rounding has f (1 - f), in the mean 1/6.  Half of that, 1/12, comes from the
    threshold: over f, the mean error is the threshold minus 1/2.  Spread thresholds of 4 ranks have
    a sum that is even in a code, so that instead of 4/12 they add 1/12.

    With a phase of its own for each rank, the thresholds of two ranks differ by the same number
    everywhere until the next run of steps; so the error is right in the mean of many runs.
    """
    grads = even_gradients()
    steps = range(0, 64 * dither.RUN_STEPS, dither.RUN_STEPS) if rounding == "dither" else [0]
    errors = [average(grads, "INT8", rounding, 0, step) - grads.mean(0) for step in steps]
    rms_codes = 127 * torch.stack(errors).square().mean().sqrt().item()
    assert rms_codes == pytest.approx(RMS_CODES[rounding], rel=0.05)


@pytest.mark.parametrize("name", LARGEST_CODES)
def test_average_of_equal_gradients_with_spread_thresholds_is_within_a_quarter_of_a_code(name):
    """4 thresholds a quarter apart round f up as often as 4 f says, rounded up or down."""
    grads = even_gradients(num_ranks=1).expand(RANKS, -1)
    largest = LARGEST_CODES[name]
    spread = average(grads, name, "dither, spread over ranks", 0, 1) - grads[0]
    assert spread.abs().max() * largest < 1 / RANKS + 1e-3
    others = average(grads, name, "independent", 0, 1) - grads[0]
    assert others.abs().max() * largest > 2 / RANKS


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_average_over_many_steps_converges_except_to_nearest(rounding):
    """The mean of n steps has, with independent errors, an RMS error of 0.2 / sqrt(n) codes.

    That is 0.026 for 64 steps.  To nearest the error is the same in every step, sqrt(1/48) = 0.14.
    """
    grads = even_gradients(numel=256 * 16)
    mean = sum(average(grads, "INT4", rounding, 0, step) for step in range(64)) / 64
    rms_codes = 7 * (mean - grads.mean(0)).square().mean().sqrt().item()
    if rounding == "nearest":
        assert rms_codes == pytest.approx(RMS_CODES[rounding], rel=0.05)
    else:
        assert rms_codes < 1.1 * RMS_CODES["independent"] / math.sqrt(64)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_average_of_a_block_of_zeros_is_zero(rounding):
    grads = even_gradients(numel=512)
    grads[:, 256:] = 0
    found = average(grads, "INT4", rounding, 0, 1)
    assert (found[256:] == 0).all() and (found[:256] != 0).any()


# --- Trainings -----------------------------------------------------------------------------------


def test_mean_of_the_ranks_gradients_is_the_gradient_of_the_whole_batch():
    """The loss is a mean over windows, of which all ranks have as many; only rounding differs."""
    grads = RankGradients(TrainingRun(TINY_RECIPE)).next(1)
    assert not torch.equal(grads[0], grads[1])
    whole = TrainingRun(TINY_RECIPE)
    whole.backward(1)
    expected = torch.cat([p.grad.flatten() for p in whole.model.parameters()])
    numel = expected.numel()
    assert grads.shape[1] % 256 == 0 and (grads[:, numel:] == 0).all()
    assert torch.allclose(grads.mean(0)[:numel], expected, atol=1e-6)


def test_final_loss_of_a_small_run_is_close_to_that_with_exact_averages():
    exact, again, rounded = (
        final_loss(TINY_RECIPE, kind, lambda: None)
        for kind in ((EXACT, "-"), (EXACT, "-"), ("INT8", "dither"))
    )
    assert exact == again
    assert rounded != exact and rounded == pytest.approx(exact, rel=0.01)


# --- The command ---------------------------------------------------------------------------------


def small_results(jobs, *, workers, label):
    """Stand for run_jobs: a replay of a small model, and losses that say of which kind they are."""
    results = {}
    for job in jobs:
        if job.function is averages:
            results[job] = averages(TINY_RECIPE, lambda: None)
        else:
            recipe, kind = job.arguments
            results[job] = 2.0 + 0.01 * recipe.seed + 0.125 * KINDS.index(kind)
    return results


def test_command_writes_all_parts_as_json_tables_and_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "run_jobs", small_results)
    out = tmp_path / "new" / "low_bit.json"
    assert command.main(["--json", str(out)]) == 0
    result, text = json.loads(out.read_text()), out.with_suffix(".md").read_text()
    assert len(result["distances"]) == 18
    assert len(result["averages"]) == len(LARGEST_CODES) * len(ROUNDINGS)
    assert all(row["rms_error"] > 0 for row in result["averages"])
    differences = [row["difference_mean"] for row in result["losses"]]
    assert differences == pytest.approx([0.125 * place for place in range(len(KINDS))])
    assert f"| INT8 | nearest | {len(SEEDS)} | 240 | 2.1500 |" in text
    assert "| bfloat16 | 1/2 | nearest | 60 | -60 | 60 |" in text
    assert "| bfloat16 | log | 14.90 | 14.90 | 15.25 | 45.05 | 2.047 | - |" in text
    written = capsys.readouterr().out
    for name in ("updates", "memory", "gradients"):
        figure = out.with_name(f"low_bit_{name}.png")
        assert figure.stat().st_size > 0 and str(figure) in written
