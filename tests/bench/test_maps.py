# SPDX-License-Identifier: Apache-2.0
"""The comparison of maps: the paper's values, pairs of codes, and the whole."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.fidelity.text import TextTask
from benchmarks.fidelity.training import Recipe
from benchmarks.maps import command
from benchmarks.maps.carried import ZERO8_DYNAMIC
from benchmarks.maps.codes import NAMES, LogPairCode, MapCode, code_of, positions
from benchmarks.maps.levels import MAPS, linear, quantile
from benchmarks.maps.once import SHOWN_MATRIX, Once, add_moments
from benchmarks.maps.pairs import PairTally
from benchmarks.maps.sensitivity import VALUES, Sensitivity, final_loss_with_eps
from examples.gpt.model import GPTConfig

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BETAS = (0.9, 0.999)
TINY_TASK = TextTask(GPTConfig(context=64, width=64, layers=1, heads=2), window=16, batch_size=2)
FIGURES = ("maps", "first_moment", "update_error", "sensitivity", "pairs_block", "pairs_tensor")


def moments(rows=8):
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(rows, 256, generator=generator)
    v = torch.randn(rows, 256, generator=generator).square() + 0.1
    return m, v


class Exact:
    """A code without loss, whose first moments go to two codes by their sign."""

    block_size = 256

    def encode(self, m, v, step):
        return {"m": (m > 0).to(torch.uint8), "v": torch.full_like(v, 7).byte(), "exact": (m, v)}

    def decode(self, state):
        return state["exact"]


# --- Maps and codes ------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_quantile_map_is_the_midpoints_of_numpys_quantiles(signed):
    x = moments()[0 if signed else 1]
    edges = [np.quantile(x.double().numpy(), i / 257) for i in range(257)]
    expected = [(low + high) / 2 for low, high in zip(edges[:-1], edges[1:], strict=True)]
    assert quantile(x, signed).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_quantile_map_gives_each_code_about_the_same_share():
    m, v = moments(rows=64)
    for codes in (MapCode(quantile).encode(m, v, 1)[moment] for moment in "mv"):
        counts = torch.bincount(codes.flatten().long(), minlength=256)
        assert counts.min() > 0 and counts.max() < 3 * counts.median()


@pytest.mark.parametrize("name", MAPS)
def test_map_ascends_from_the_least_to_the_largest_value(name):
    m, v = (x / x.abs().max() for x in moments())
    for x, signed, least in ((m, True, -1.0), (v, False, 0.0)):
        levels = MAPS[name](x, signed)
        assert levels.dtype == torch.float32 and 255 <= len(levels) <= 256
        assert (levels.diff() > 0).all()
        assert levels[0] >= least and levels[-1] <= 1.0
        assert bool((levels < 0).any()) == signed


def test_linear_map_has_zero_and_even_distances():
    for signed, cells in ((True, 254), (False, 255)):
        levels = linear(torch.zeros(1), signed)
        assert 0.0 in levels and levels[-1] == 1.0 and len(levels) == cells + 1
        assert levels.diff().max() == pytest.approx(levels.diff().min().item(), rel=1e-4)


@pytest.mark.parametrize("grain", ["block", "tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_code_decodes_near_the_moments_and_zero_blocks_to_zero(name, grain):
    m, v = moments()
    m[0], v[0] = 0.0, 0.0
    code = code_of(name, grain)
    m, v = (x.reshape(-1, code.block_size or x.numel()) for x in (m, v))
    decoded_m, decoded_v = code.decode(code.encode(m, v, 1))
    assert ((decoded_m - m).abs().mean() / m.abs().mean()) < 0.02
    assert ((decoded_v - v).abs().mean() / v.mean()) < 0.02
    if grain == "block":
        assert not decoded_m[0].any() and not decoded_v[0].any()


def test_positions_of_log_codes_ascend_with_their_values():
    m, v = moments()
    state = LogPairCode().encode(m, v, 1)
    values = LogPairCode().decode(state)
    for moment, x in zip("mv", values, strict=True):
        places, order = positions(state[moment])[0], x[0].argsort()
        assert (places[order].diff() >= 0).all()
        assert 0 <= places.min() and places.max() <= 255


# --- Pairs of codes ------------------------------------------------------------------------------


def test_tally_counts_sum_to_the_number_of_elements():
    m, v = moments()
    for name in NAMES:
        tally = PairTally()
        add_moments(tally, code_of(name, "block"), m, v, 3, BETAS)
        assert tally.count.sum() == tally.result()["elements"] == m.numel()
        assert sum(tally.by_first_moment()["share"]) == pytest.approx(1.0)
        assert torch.nansum(tally.share()) == pytest.approx(1.0)


def test_tally_of_a_lossless_code_has_no_error():
    m, v = moments()
    tally = PairTally()
    add_moments(tally, Exact(), m, v, 3, BETAS)
    result = tally.result()
    assert result["pairs_used"] == 2
    for key in ("mean_absolute_error", "mean_relative_error", "rms_update_error"):
        assert result[key] == 0.0
    assert torch.nansum(tally.absolute_error()) == torch.nansum(tally.relative_error()) == 0.0


def test_tally_on_made_up_updates_has_their_errors():
    tally = PairTally()
    m_codes, v_codes = torch.tensor([3, 3, 5, 5]), torch.tensor([0, 0, 1, 2])
    reference = torch.tensor([1.0, 2.0, 0.0, -4.0])
    tally.add(m_codes, v_codes, torch.tensor([1.5, 2.0, 0.5, -4.0]), reference)
    assert tally.count[3, 0] == 2 and tally.count[5, 1] == 1 and tally.moving[5, 1] == 0
    assert tally.absolute_error()[3, 0] == 0.25 and tally.relative_error()[3, 0] == 0.25
    assert tally.relative_error()[5, 1].isnan() and tally.share()[0, 0].isnan()
    result = tally.result()
    assert result["mean_absolute_error"] == 0.25
    assert result["mean_relative_error"] == pytest.approx(0.5 / 3)
    assert result["large_relative_share"] == pytest.approx(1 / 3)
    assert result["rms_update_error"] == pytest.approx((0.5 / 21) ** 0.5)
    by_code = tally.by_first_moment()
    assert by_code["absolute_error"][3] == by_code["absolute_error"][5] == 0.25
    assert by_code["relative_error"][4] is None


# --- Runs ----------------------------------------------------------------------------------------


def test_final_loss_depends_on_every_hyperparameter():
    recipe = Recipe(2, 0.999, task=TINY_TASK)
    default = final_loss_with_eps(recipe, 1e-8, "fp32", lambda: None)
    changes = ({"peak_lr": 1e-2}, {"beta1": 0.5}, {"beta2": 0.5}, {"weight_decay": 1.0})
    others = [(replace(recipe, **change), 1e-8) for change in changes] + [(recipe, 1e-2)]
    for changed, eps in others:
        assert final_loss_with_eps(changed, eps, "fp32", lambda: None) != default


def test_sensitivity_varies_one_hyperparameter_at_a_time():
    default = Recipe(3, 0.999)
    jobs = Sensitivity(default, quick=False).jobs()
    assert len(jobs) == len(set(jobs)) == 3 * (3 + sum(map(len, VALUES.values())))
    for job in jobs:
        recipe, eps, _ = job.arguments
        changed = [f for f, x in vars(default).items() if getattr(recipe, f) != x]
        assert len(changed) + (eps != 1e-8) <= 1


def tiny_results(jobs, *, workers, label):
    """Stands for run_jobs: every job on a tiny model, and with made-up losses."""
    results = {}
    for job in jobs:
        recipe, *others = job.arguments
        tiny = replace(recipe, task=TINY_TASK)
        is_loss = job.function is final_loss_with_eps
        results[job] = 2.0 if is_loss else job.function(tiny, *others, lambda: None)
    return results


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """The JSON object of a quick run of 2 steps whose jobs are tiny, and the path of its file."""
    out = tmp_path_factory.mktemp("maps") / "new" / "quick.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "run_jobs", tiny_results)
        arguments = ["--quick", "--steps", "2", "--workers", "1", "--json", str(out)]
        assert command.main(arguments) == 0
    return json.loads(out.read_text()), out


def test_command_writes_json_tables_and_figures(quick_run):
    _, out = quick_run
    table = out.with_suffix(".md").read_text()
    for heading in ("One quantization", "States kept in 8 bits", "Final losses"):
        assert f"## {heading}" in table
    for name in FIGURES:
        assert out.with_name(f"quick_{name}.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(out.parent.iterdir())) == 2 + len(FIGURES)


def test_result_has_a_row_for_each_map_and_grain(quick_run):
    result, _ = quick_run
    pairs = {(name, grain) for name in NAMES for grain in ("block", "tensor")}
    for key in ("once", "first_moment"):
        assert {(row["map"], row["grain"]) for row in result[key]} == pairs
    carried = {(row["map"], row["grain"]) for row in result["carried"]}
    assert carried == pairs | {(ZERO8_DYNAMIC, "block")}
    assert {row["hyperparameter"] for row in result["sensitivity"]} == {"default", *VALUES}
    assert len({row["elements"] for row in result["once"]}) == 1
    assert all(len(row["share"]) == 256 for row in result["first_moment"])
    assert all(len(values) in (255, 256) for m in "mv" for values in result["maps"][m].values())


def test_errors_of_block_wise_log_are_the_smallest(quick_run):
    result, _ = quick_run
    for key in ("once", "carried"):
        errors = {(row["map"], row["grain"]): row["rms_update_error"] for row in result[key]}
        assert min(errors, key=errors.get) == ("log", "block")


def test_once_shows_a_matrix_that_the_model_has():
    names = dict(TextTask().make_model().named_parameters())
    assert SHOWN_MATRIX in names and Once(Recipe(2, 0.999)).jobs()


def test_bad_arguments_say_what_is_expected(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--steps", "1", "--json", str(tmp_path / "x.json")])
    assert "--steps: got 1, expected at least 2" in capsys.readouterr().err
