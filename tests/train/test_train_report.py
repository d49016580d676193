# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from examples.gpt.config import TWINS
from examples.gpt.report import report

RUN = {
    "codec": "log",
    "weights": "float32",
    "weight_bytes_per_param": 4.0,
    "steps": 3,
    "seed": 0,
    "config": "configs/zero2_offload.json",
    "val_loss": 2.5,
    "train_loss": 2.4,
    "state_bytes_per_param": 8.0,
    "state_bytes": 2**20,
    "host_peak_gib": 1.0,
    "gpu_peak_gib": None,
    "iteration_ms": 100.0,
    "parameters": 1000,
    "device": "cpu",
    "ranks": 2,
    "data": {"path": "text", "files": 20, "bytes": 4000},
    "train_curve": [5.0, 3.0, 2.4],
    "val_curve": [[3, 2.5]],
}


@pytest.fixture
def reported(tmp_path, capsys):
    """Return a function: the summary of two runs, and the words of each line that is printed."""

    def of(optimizer="Adam8bitBlockwise", **changes):
        for name in (TWINS[optimizer], optimizer):
            run = {**RUN, "optimizer": name} | changes.get(name, {}) | changes.get("both", {})
            (tmp_path / f"{name}.json").write_text(json.dumps(run))
        summary = report(tmp_path, optimizer, "launch/local.sh")
        return summary, [line.split() for line in capsys.readouterr().out.splitlines()]

    return of


@pytest.mark.parametrize("optimizer", TWINS)
def test_report_has_both_runs_their_table_and_a_figure(reported, tmp_path, optimizer):
    ours = {"val_loss": 2.55, "state_bytes_per_param": 2.03}
    summary, lines = reported(optimizer, **{optimizer: ours})
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert [run["optimizer"] for run in summary["runs"]] == [TWINS[optimizer], optimizer]
    assert summary["versions"].keys() >= {"python", "torch", "zero8", "platform", "cpu"}
    row = ["2.030", "1.00", "1.00", "2.4000", "2.5500", "100.0"]
    assert [optimizer, *row] in lines and "+2.00" in sum(lines, [])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
