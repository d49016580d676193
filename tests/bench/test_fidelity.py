# SPDX-License-Identifier: Apache-2.0
"""The fidelity measurement: rivals, errors, tasks, and the whole table in few steps."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.fidelity import __main__ as command
from benchmarks.fidelity import rivals
from benchmarks.fidelity.runs import replay
from benchmarks.fidelity.schemes import CONTROL, FP32, PEERS, RIVALS, usable
from benchmarks.fidelity.table import SETTINGS
from benchmarks.fidelity.tasks import TextTask
from benchmarks.fidelity.training import Setting
from examples.gpt.model import GPTConfig

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TINY_TASK = TextTask(GPTConfig(context=64, width=64, layers=1, heads=2), window=16, batch_size=2)
TINY = Setting("tiny", TINY_TASK, 4, options={"betas": (0.9, 0.95)})


def tiny(setting):
    """Return a setting in few steps; its GPT becomes a small one."""
    task = TINY_TASK if isinstance(setting.task, TextTask) else setting.task
    return replace(setting, task=task, steps=6, seeds=(1, 2))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_replay_of_every_setting_has_small_errors_and_moves_nothing_without_a_gradient(setting):
    setting, _ = usable(tiny(setting))
    rows = {row["scheme"]: row for row in replay(setting)}
    assert list(rows) == list(setting.replayed)
    json.dumps(list(rows.values()), allow_nan=False)
    # An INT8 weight moves with the scale of its row, and others may move weights as they like.
    rows = {name: row for name, row in rows.items() if name not in RIVALS}
    ours = [row for name, row in rows.items() if not (name in PEERS or name.startswith("INT8"))]
    assert all(row["zero_grad_moved"] == 0 for row in ours)
    assert all(row["rms_update_error"] < 0.7 for row in rows.values())
    if "log" in rows:
        assert 0 < rows["log"]["rms_update_error"] < rows["linear4"]["rms_update_error"]
    if CONTROL in rows:
        assert rows[CONTROL]["rms_update_error"] < 1e-6
        assert rows[CONTROL]["sqrt_v_bias"] == pytest.approx(1, abs=1e-6)


def test_codes_of_papers_err_by_half_their_largest_gap_in_the_bits_that_papers_count():
    x = -torch.rand(8, 256, generator=torch.Generator().manual_seed(0))
    x[:, :4], x[1] = torch.tensor([0.0, -0.45, -0.45, -1e-40]), 0.0
    for code, error, bits in [
        (rivals.DYNAMIC_4, 0.1125, 4 + 32 / 128),
        (rivals.DYNAMIC_2, 0.45, 2 + 32 / 128),
        (rivals.FP8, 1 / 28, 8 + 32 / 128),
        (rivals.flash(True), 1 / 127, 8 + 16 / 32),
    ]:
        stored, blocks = code.stored(x, 1), x.view(-1, code.block_size)
        assert sum(t.nbytes for t in stored) * 8 == bits * x.numel()
        errors = (code.read(stored) - blocks).abs().amax(1)
        assert (errors <= 1.0001 * error * blocks.abs().amax(1)).all()


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
