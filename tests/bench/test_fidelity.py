# SPDX-License-Identifier: Apache-2.0
"""The fidelity measurement: rivals, errors, tasks, and the whole table in few steps."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.fidelity import __main__ as command
from benchmarks.fidelity.errors import Errors, sqrt_bias
from benchmarks.fidelity.losses import final_loss
from benchmarks.fidelity.replay import States, replay
from benchmarks.fidelity.schemes import CONTROL, FP32, PEERS, SCHEMES, usable
from benchmarks.fidelity.table import SETTINGS
from benchmarks.fidelity.text import TextTask
from benchmarks.fidelity.training import Gradients, Setting, flat
from examples.gpt.model import GPTConfig

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TINY_TASK = TextTask(GPTConfig(context=64, width=64, layers=1, heads=2), window=16, batch_size=2)
TINY = Setting("tiny", TINY_TASK, 4, options={"betas": (0.9, 0.95)})


def tiny(setting):
    """Return a setting in few steps; its GPT becomes a small one."""
    task = TINY_TASK if isinstance(setting.task, TextTask) else setting.task
    return replace(setting, task=task, steps=6, seeds=(1, 2))


def gradients(steps):
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-5, 0, 64 * 128).view(64, 128)
    return [torch.randn(64, 128, generator=generator) * scale for _ in range(steps)]


@pytest.mark.parametrize("scheme", [FP32, CONTROL])
def test_update_of_states_in_float32_is_adams_u(scheme):
    beta1, beta2 = TINY.options["betas"]
    rival = States(SCHEMES[scheme], TINY, {"weight": torch.ones(64, 128)})
    m = v = torch.zeros(64 * 128, dtype=torch.float64)
    for step, grad in enumerate(gradients(20), 1):
        m = beta1 * m + (1 - beta1) * grad.flatten().double()
        v = beta2 * v + (1 - beta2) * grad.flatten().double() ** 2
        expected = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + 1e-8)
        found = rival.update([grad], step).double()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_errors_of_made_up_updates():
    errors = Errors(1000)
    update = torch.full((1000,), 1.125)
    update[:2] = 5.0
    for u in (torch.ones(1000), update):
        errors.compare(u, torch.ones(1000))
    squares = 998 * 0.125**2 + 2 * 4.0**2
    assert errors.rms == pytest.approx((squares / 2000) ** 0.5)
    assert errors.drift == pytest.approx((squares / 4000) ** 0.5)
    assert sqrt_bias(torch.tensor([4.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])) == 2


def test_gradients_are_the_models_and_zero_where_untrained():
    models = TINY.make_model(0), TINY.make_model(0)
    found = Gradients(TINY, models[0])
    grads = dict(zip(found.matrices, found.next(3), strict=True))
    models[1](*TINY.task.batch(0, 3)).backward()
    models[1].blocks[0].mlp[0].weight.grad[:, ::16] = 0.0
    torch.nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
    expected = dict(models[1].named_parameters())
    assert all(torch.equal(grad, expected[name].grad) for name, grad in grads.items())
    assert found.untrained.numel() == 48 * 64 + 256 * 4
    assert not flat(grads.values())[found.untrained].any()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_replay_of_every_setting_has_small_errors_and_moves_nothing_without_a_gradient(setting):
    setting, _ = usable(tiny(setting))
    rows = {row["scheme"]: row for row in replay(setting)}
    assert list(rows) == list(setting.replayed)
    # An INT8 weight moves with the scale of its row, and others may move weights as they like.
    ours = [row for name, row in rows.items() if not (name in PEERS or name.startswith("INT8"))]
    assert all(row["zero_grad_moved"] == 0 for row in ours)
    assert all(row["rms_update_error"] < 0.7 for row in rows.values())
    if "log" in rows:
        assert 0 < rows["log"]["rms_update_error"] < rows["linear4"]["rms_update_error"]
    if CONTROL in rows:
        assert rows[CONTROL]["rms_update_error"] < 1e-6
        assert rows[CONTROL]["sqrt_v_bias"] == pytest.approx(1, abs=1e-6)
    json.dumps(list(rows.values()), allow_nan=False)


def test_final_loss_depends_on_the_scheme_only():
    names = (FP32, FP32, CONTROL, "log", "bf16 weights, dither")
    fp32, again, control, log, bf16 = (final_loss(TINY, name, 1) for name in names)
    assert fp32 == again
    assert control == pytest.approx(fp32, rel=1e-5)
    for loss in (log, bf16):
        assert loss != control and loss == pytest.approx(fp32, rel=0.01)


def test_scheme_that_cannot_run_here_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    setting = replace(TINY, replayed=("log", "bitsandbytes"), trained=(FP32, "bitsandbytes"))
    kept, (skipped,) = usable(setting)
    assert (kept.replayed, kept.trained) == (("log",), (FP32,))
    assert skipped["scheme"] == "bitsandbytes" and "ModuleNotFoundError" in skipped["reason"]


def test_command_writes_a_row_per_setting_and_scheme(tmp_path, monkeypatch):
    settings = [tiny(replace(s, trained=(FP32, "log"))) for s in SETTINGS if "Lion" in s.name]
    monkeypatch.setattr(command, "SETTINGS", settings)
    monkeypatch.setattr(command, "run_all", lambda jobs, workers: [job() for job in jobs])
    out = tmp_path / "new" / "out.json"
    monkeypatch.setattr(sys, "argv", ["x", "--only", "GPT", "--json", str(out)])
    command.main()
    rows = {row["scheme"]: row for row in json.loads(out.read_text())["rows"]}
    assert {row["setting"] for row in rows.values()} == {"GPT, Lion"}
    assert rows[FP32]["difference_mean"] == 0 and len(rows["log"]["val_losses"]) == 2
    # Lion's update is a sign.
    assert rows["log"]["largest_update"] == 1
    assert (
        f"| GPT, Lion | log | {rows['log']['bytes_per_param']:.4g} |"
        in out.with_suffix(".md").read_text()
    )
