# SPDX-License-Identifier: Apache-2.0
"""The fidelity measurement: shadow parameters, metrics, other libraries' codes, and the whole."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import islice

import pytest
import torch

from benchmarks.fidelity import command as fidelity
from benchmarks.fidelity import schemes
from benchmarks.fidelity.bf16 import final_loss_bf16, weight_distances
from benchmarks.fidelity.codes import FlashCode, FourBitCode, RatioCode
from benchmarks.fidelity.losses import final_loss
from benchmarks.fidelity.metrics import Tally, update_bounds
from benchmarks.fidelity.replay import replay
from benchmarks.fidelity.resonance import resonance
from benchmarks.fidelity.robustness import SETTINGS
from benchmarks.fidelity.silence import silence
from benchmarks.fidelity.states import ClosedLoop, Updates
from benchmarks.fidelity.targets import _robustness_checks
from benchmarks.fidelity.text import TextTask
from benchmarks.fidelity.training import Gradients, Layout, Recipe, TrainingRun
from examples.gpt.model import GPTConfig

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LAYOUT = Layout(("a", "b"), ((64, 128), (128, 64)))
BETAS = (0.9, 0.95)
TINY = Recipe(
    steps=4,
    beta2=0.95,
    task=TextTask(GPTConfig(context=64, width=64, layers=1, heads=2), window=16, batch_size=2),
)
ROW_KEYS = {
    "scheme",
    "block_size",
    "beta2",
    "bytes_per_param",
    "rms_update_error",
    "p999_update_error",
    "max_abs_u",
    "max_abs_u_bound",
    "drift",
    "zero_grad_moved",
    "sqrt_v_bias",
    "v_zero_share",
    "implementation",
    "note",
}
RESULT_KEYS = {
    "default",
    "rows",
    "closed_loop",
    "skipped",
    "versions",
    "commit",
    "command",
    "cpu",
    "steps",
    "seconds",
    "cpu_seconds",
}


def gradients(steps):
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-5, 0, LAYOUT.numel)
    return [torch.randn(LAYOUT.numel, generator=generator) * scale for _ in range(steps)]


def adam_updates(grads, betas, eps=1e-8):
    m = v = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for step, grad in enumerate(grads, 1):
        m = betas[0] * m + (1 - betas[0]) * grad.double()
        v = betas[1] * v + (1 - betas[1]) * grad.double() ** 2
        yield m / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)).sqrt() + eps)


# --- Shadow parameters ---------------------------------------------------------------------------


class Exact:
    """A code without loss."""

    block_size = 64

    def encode(self, m, v, step):
        return {"m": m, "v": v}

    def decode(self, state):
        return state["m"].clone(), state["v"].clone()


@pytest.mark.parametrize(
    "scheme",
    [
        schemes.torch_adamw(torch.float32),
        schemes.zero8_fp32(),
        schemes.reimplemented("exact", Exact(), ""),
    ],
    ids=lambda scheme: scheme.name,
)
def test_shadow_update_is_adams_u(scheme):
    shadow = schemes.Shadow(scheme, LAYOUT, BETAS)
    grads = gradients(20)
    for grad, expected in zip(grads, adam_updates(grads, BETAS), strict=True):
        torch.testing.assert_close(shadow.update(grad).double(), expected, rtol=1e-6, atol=1e-6)


def test_shadow_reads_second_moments_and_bytes():
    exact = schemes.Shadow(schemes.torch_adamw(torch.float32), LAYOUT, BETAS)
    ours = schemes.Shadow(schemes.zero8_scheme("log"), LAYOUT, BETAS)
    for grad in gradients(10):
        exact.update(grad)
        ours.update(grad)
    ratio = ours.second_moments() / exact.second_moments()
    assert ratio.log().abs().max() < 0.3
    assert exact.bytes_per_param() == pytest.approx(8, abs=0.001)
    # Rows of 128 and 64: 12 bytes of scales for each.
    assert ours.bytes_per_param() == pytest.approx(2 + 12 * (1 / 128 + 1 / 64) / 2, abs=0.01)


def test_flat_scheme_has_blocks_across_rows():
    scheme = schemes.zero8_scheme("dynamic", 2048)
    assert scheme.flat and "end to end" in scheme.note
    shadow = schemes.Shadow(scheme, LAYOUT, BETAS)
    shadow.update(gradients(1)[0])
    assert shadow.bytes_per_param() == pytest.approx(2 + 8 / 2048, abs=0.01)


# --- Metrics -------------------------------------------------------------------------------------


def test_tally_on_made_up_updates():
    reference = torch.ones(1000)
    update = torch.full((1000,), 1.125)
    update[:2] = 5.0
    tally = Tally(1000, torch.tensor([0, 5]))
    for u in (reference, update):
        tally.watch(u, bound=2.0)
        tally.compare(u, reference)
    tally.compare_second_moments(torch.tensor([4.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 0.0]))
    result = tally.result()
    squares = 998 * 0.125**2 + 2 * 4.0**2
    assert result["rms_update_error"] == pytest.approx((squares / 2000) ** 0.5)
    assert result["p999_update_error"] == pytest.approx(0.125, rel=0.02)
    assert result["drift"] == pytest.approx((squares / 4000) ** 0.5)
    assert result["max_abs_u"] == 5.0
    assert result["max_abs_u_bound"] == 2.0
    assert result["max_u_over_bound"] == 2.5
    assert (result["zero_grad_moved"], result["zero_grad_count"]) == (2, 2)
    assert result["sqrt_v_bias"] == pytest.approx(2.0)
    assert result["v_zero_share"] == 0.5


def test_percentile_counts_the_tail():
    tally = Tally(10000, torch.tensor([0]))
    update = torch.ones(10000)
    update[:20] = 3.0
    tally.watch(update, bound=1.0)
    tally.compare(update, torch.ones(10000))
    tally.compare_second_moments(torch.ones(1), torch.ones(1))
    assert tally.result()["p999_update_error"] == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(("beta2", "limit"), [(0.999, 7.270), (0.95, 1.165)])
def test_update_bounds_are_reached_and_converge(beta2, limit):
    bounds = list(islice(update_bounds((0.9, beta2)), 20000))
    assert bounds[0] == pytest.approx(1.0)
    assert bounds[-1] == pytest.approx(limit, abs=1e-3)
    # Cauchy-Schwarz holds with equality for g_i proportional to a_i/b_i = (beta1/beta2)^(t-i).
    t = 30
    ages = torch.arange(t - 1, -1, -1, dtype=torch.float64)
    g = (0.9 / beta2) ** ages
    m = (0.1 * 0.9**ages * g).sum() / (1 - 0.9**t)
    v = ((1 - beta2) * beta2**ages * g**2).sum() / (1 - beta2**t)
    assert bounds[t - 1] == pytest.approx((m / v.sqrt()).item())


# --- Re-implemented codes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "m_error", "v_error"),
    # Half the largest cell in units of the block's largest m or sqrt(v), and rounding; the 4-bit
    # map of m ends at -0.8875, where -1 goes.
    [(FlashCode(), 1 / 127 + 1e-3, 0.5 / 255 + 1e-3), (FourBitCode(), 0.1126, None)],
    ids=["flashoptim", "4bit"],
)
def test_code_error_bounds_and_zero(code, m_error, v_error):
    generator = torch.Generator().manual_seed(1)
    m = torch.randn(8, code.block_size, generator=generator)
    v = torch.randn(8, code.block_size, generator=generator).square()
    m[0], v[0] = 0.0, 0.0
    m[1, 0] = 0.0
    decoded_m, decoded_v = code.decode(code.encode(m, v, 1))
    error = (decoded_m - m).abs().amax(1) / m.abs().amax(1).clamp(min=1e-9)
    assert error.max() <= m_error
    assert (decoded_m[m == 0] == 0).all() and (decoded_v[0] == 0).all()
    if v_error:
        error = (decoded_v.sqrt() - v.sqrt()).abs().amax(1) / v.sqrt().amax(1).clamp(min=1e-9)
        assert error.max() <= v_error
    else:
        error = (decoded_v - v).abs().amax(1) / v.amax(1).clamp(min=1e-9)
        assert error.max() <= 1 / 16
        assert (decoded_v[1:] > 0).all()


def test_ratio_code_error_bounds_and_zero():
    generator = torch.Generator().manual_seed(2)
    m = torch.randn(4, 256, generator=generator)
    v = torch.randn(4, 256, generator=generator).square() + 0.01
    m[0], v[0] = 0.0, 0.0
    decoded_m, decoded_v = RatioCode().decode(RatioCode().encode(m, v, 1))
    assert (decoded_m[0] == 0).all() and (decoded_v[0] == 0).all()
    assert (decoded_v[1:] / v[1:]).log().abs().max() < 0.1
    ratio, decoded_ratio = m[1:] / decoded_v[1:].sqrt(), decoded_m[1:] / decoded_v[1:].sqrt()
    step = ratio.abs().amax(1, keepdim=True) / 127
    assert ((decoded_ratio - ratio).abs() <= 0.501 * step).all()


# --- Runs ----------------------------------------------------------------------------------------


def test_gradients_are_the_models_and_zero_where_untrained():
    run, plain = TrainingRun(TINY), TrainingRun(TINY)
    gradients = Gradients(run)
    plain.backward(3)
    plain.model.blocks[0].mlp[0].weight.grad[:, ::16] = 0.0
    torch.nn.utils.clip_grad_norm_(plain.model.parameters(), TINY.max_norm)
    expected = dict(plain.model.named_parameters())
    gradients.next(2)
    for name, grad in zip(
        gradients.layout.names, gradients.layout.views(gradients.next(3)), strict=True
    ):
        assert torch.equal(grad, expected[name].grad), name
    zeros = gradients.flat[gradients.untrained]
    assert zeros.numel() == 48 * 64 + 256 * 4 and not zeros.any()


def test_replay_returns_rows_and_skipped_schemes(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    ticks = []
    chosen = [schemes.zero8_fp32(), schemes.zero8_scheme("log"), schemes.bitsandbytes()]
    rows, skipped = replay(TINY, chosen, lambda: ticks.append(1))
    assert len(ticks) == TINY.steps
    (missing,) = skipped
    assert (missing["scheme"], missing["beta2"]) == ("bitsandbytes", 0.95)
    assert "ModuleNotFoundError" in missing["reason"]
    fp32, log = rows
    assert log.keys() >= ROW_KEYS
    assert fp32["rms_update_error"] < 1e-6
    assert 1e-6 < log["rms_update_error"] < 0.1
    assert log["zero_grad_moved"] == 0 and log["zero_grad_count"] > 0
    assert log["max_abs_u"] <= log["max_abs_u_bound"] * (1 + 2.0**-10)
    json.dumps(rows, allow_nan=False)


def test_final_loss_depends_on_the_optimizer_only():
    names = ("fp32", "fp32", "fp32_zero8", "log")
    fp32, again, control, log = (final_loss(TINY, name, lambda: None) for name in names)
    assert fp32 == again
    assert control == pytest.approx(fp32, rel=1e-5)
    assert log != control and log == pytest.approx(fp32, rel=0.01)


def test_bad_arguments_say_what_is_expected(tmp_path, capsys):
    with pytest.raises(SystemExit):
        fidelity.main(["--steps", "1", "--json", str(tmp_path / "x.json")])
    assert "--steps: got 1, expected at least 2" in capsys.readouterr().err


# --- The whole measurement -----------------------------------------------------------------------


def made_up_row(scheme, beta2, block_size=256, **changes):
    row = dict.fromkeys(ROW_KEYS, 0.5) | {"max_u_over_bound": 1.0, "zero_grad_count": 7}
    row |= {"scheme": scheme, "beta2": beta2, "block_size": block_size, "zero_grad_moved": 0}
    return row | {"implementation": "zero8", "note": ""} | changes


def quick_results(jobs, *, workers, label):
    """Stands for run_jobs: a small run's rows where that is quick, made-up ones elsewhere."""
    results = {}
    for job in jobs:
        recipe = job.arguments[0]
        if job.function in (final_loss, final_loss_bf16):
            above_fp32 = {"nearest": 0.5, "dither": -0.001, "log": 0.001}.get(job.arguments[1], 0.0)
            results[job] = 2.0 + 0.01 * recipe.seed + above_fp32
        elif job.function is weight_distances:
            results[job] = weight_distances(replace(TINY, beta2=0.999), lambda: None)
        elif job.function is silence:
            results[job] = silence(*job.arguments, lambda: None)
        elif job.function is resonance:
            members, beta2, _ = job.arguments
            results[job] = resonance(members[::25], beta2, 6, lambda: None)
        else:
            rows = [
                made_up_row("log", recipe.beta2, rms_update_error=0.02),
                made_up_row("dynamic", recipe.beta2, rms_update_error=0.1),
                made_up_row("deepspeed_bf16", recipe.beta2, None, rms_update_error=0.01),
            ]
            skipped = {"scheme": "torchao", "reason": "gone", "beta2": recipe.beta2}
            results[job] = (rows, [skipped])
    return results


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    """The JSON object of a full run whose jobs are quick, the path of its file, what it printed."""
    out = tmp_path_factory.mktemp("fidelity") / "new" / "full.json"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(fidelity, "run_jobs", quick_results)
        assert fidelity.main(["--steps", "8", "--workers", "1", "--json", str(out)]) == 0
    return json.loads(out.read_text()), out, printed.getvalue()


def test_full_run_writes_the_results_of_all_parts_as_json_tables_and_figure(full_run):
    result, out, _ = full_run
    assert result.keys() >= RESULT_KEYS
    assert {row["setting"] for row in result["robustness"]} == set(SETTINGS)
    assert {row["beta2"] for row in result["silence"]} == {0.999, 0.95}
    assert {row["beta2"] for row in result["resonance"]} == {0.9, 0.95, 0.99, 0.999, 0.9999}
    assert {entry.get("setting") for entry in result["skipped"]} == {None, *SETTINGS}
    table = out.with_suffix(".md").read_text()
    assert "| log (zero8) | 256 |" in table and "torchao, beta2 = 0.95: gone" in table
    for heading in ("bfloat16 weights", "Other settings", "Gradients that end", "Periodic"):
        assert f"## {heading}" in table
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_full_run_compares_losses_with_fp32s_of_the_same_seeds(full_run):
    result, *_ = full_run
    losses = {row["scheme"]: row for row in result["closed_loop"]}
    losses |= {row["weights"]: row for row in result["bf16_weights"]["closed_loop"]}
    assert losses["fp32"]["val_losses"] == pytest.approx([2.01, 2.02, 2.03, 2.04, 2.05])
    assert losses["fp32"]["val_loss_std"] == pytest.approx(0.01 * 2.5**0.5)
    for name, difference in (("log", 0.001), ("dither", -0.001), ("nearest", 0.5)):
        assert losses[name]["difference_mean"] == pytest.approx(difference)
        assert losses[name]["difference_std"] == pytest.approx(0, abs=1e-9)


def test_full_run_judges_every_target_and_prints_what_is_missed(full_run):
    result, _, printed = full_run
    met = {check["target"]: check["met"] for check in result["checks"]}
    assert met["RMS error over that of `dynamic`, beta2 0.999"]
    assert not met["RMS error over that of DeepSpeed's bf16 states, beta2 0.999"]
    assert met["bf16 weights, dither: mean loss above fp32's against fp32's std"]
    assert met["bf16 weights, nearest (to be worse): mean loss above fp32's against fp32's std"]
    assert met["moved though g = 0, all settings, beta2 0.95"]
    assert sum("periodic gradients" in target for target in met) == 2
    assert sum("gradient has ended" in target for target in met) == 2
    assert "MISSED  RMS error over that of DeepSpeed's bf16 states, beta2 0.999" in printed


def test_robustness_check_names_the_worst_setting():
    good, bad = (
        [
            {"setting": name, **made_up_row("log", 0.95, rms_update_error=ours)},
            {"setting": name, **made_up_row("dynamic", 0.95, rms_update_error=0.1)},
        ]
        for name, ours in (("calm", 0.02), ("wild", 0.2))
    )
    found = _robustness_checks(0.95, {"default": "log", "robustness": [*good, *bad]})
    assert not found[0]["met"] and "worst: wild" in found[0]["target"]
    assert found[0]["value"] == pytest.approx(2.0)
    assert found[1]["met"] and found[2]["met"]


def test_quick_run_has_the_main_parts_only():
    kinds = [type(part) for part in fidelity.experiments(quick=True, steps=8)]
    assert kinds == [Updates, ClosedLoop]
