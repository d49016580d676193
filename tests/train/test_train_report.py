# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from places import ROOT

from examples.gpt.engine import TWINS
from examples.gpt.report import label, report

SUMMARY_KEYS = {
    "engine",
    "unigram_entropy",
    "seed",
    "command",
    "versions",
    "ranks",
    "config",
    "data",
    "runs",
    "at_scale",
}
ROW_KEYS = {
    "optimizer",
    "weights",
    "weight_bytes_per_param",
    "steps",
    "val_loss",
    "train_loss",
    "state_bytes_per_param",
    "state_bytes_per_param_all",
    "state_bytes",
    "host_peak_gib",
    "gpu_peak_gib",
    "step_ms",
    "iteration_ms",
}


AT_SCALE = {
    "numel": 4096,
    "threads": 2,
    "rounds": 1,
    "rows": [
        {"optimizer": "AdamW", "state_bytes": 2**25, "host_bytes": 2**26, "step_ms": 30.0},
        {"optimizer": "Adam8bitBlockwise", "state_bytes": 2**23, "host_bytes": 5 * 2**23}
        | {"step_ms": 10.25},
    ],
}


def write_run(out, optimizer, **changes):
    run = {
        "engine": "deepspeed",
        "optimizer": optimizer,
        "codec": None if optimizer in TWINS.values() else "log",
        "weights": "float32",
        "weight_bytes_per_param": 4.0,
        "steps": 3,
        "seed": 0,
        "config": "configs/zero2_offload.json",
        "val_loss": 2.5,
        "train_loss": 2.4,
        "state_bytes_per_param": 8.0,
        "state_bytes_per_param_all": 8.0,
        "state_bytes": 8000,
        "state_numel": 1000,
        "host_peak_gib": 1.0,
        "gpu_peak_gib": None,
        "step_ms": 0.5,
        "iteration_ms": 100.0,
        "tokens_per_step": 64,
        "parameters": 1000,
        "device": "cpu",
        "ranks": 2,
        "unigram_entropy": 3.1,
        "data": {"path": "text", "files": 20, "bytes": 4000},
        "train_curve": [5.0, 3.0, 2.4],
        "val_curve": [[3, 2.5]],
    }
    (out / f"{optimizer}.json").write_text(json.dumps({**run, **changes}))


def test_report_two_runs_writes_summary_and_plot(tmp_path, capsys):
    write_run(tmp_path, "Adam8bitBlockwise", val_loss=2.55, state_bytes_per_param=2.03)
    write_run(tmp_path, "AdamW")
    report(tmp_path, "Adam8bitBlockwise", AT_SCALE, "launch/local.sh")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["versions"].keys() >= {"python", "torch", "deepspeed", "zero8", "platform"}
    assert [run["optimizer"] for run in summary["runs"]] == ["AdamW", "Adam8bitBlockwise"]
    assert all(run.keys() >= ROW_KEYS for run in summary["runs"])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "2.030" in printed and "GPU" not in printed
    assert "+2.00 %" in printed
    assert "codec of Adam8bitBlockwise: log\n" in printed
    assert summary["at_scale"] == AT_SCALE
    assert "4,096 float32 parameters" in printed and "2 threads" in printed
    lines = [line.split() for line in printed.splitlines()]
    assert ["AdamW", "32.0", "0.062", "30.0"] in lines
    assert ["Adam8bitBlockwise", "8.0", "0.039", "10.2"] in lines


def test_report_of_runs_on_a_gpu_has_its_peak(tmp_path, capsys):
    for optimizer in ("AdamW", "Adam8bitBlockwise"):
        write_run(tmp_path, optimizer, device="cuda", gpu_peak_gib=12.345)
    report(tmp_path, "Adam8bitBlockwise", AT_SCALE, "")
    printed = capsys.readouterr().out
    assert "GPU peak GiB" in printed and printed.count(" 12.35") == 2


def test_report_of_an_untimed_step_prints_a_dash(tmp_path, capsys):
    write_run(tmp_path, "Muon", step_ms=None)
    write_run(tmp_path, "Muon8bitBlockwise")
    report(tmp_path, "Muon8bitBlockwise", {**AT_SCALE, "rows": []}, "")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-2:] for line in lines if line and line[0].startswith("Muon")] == [
        ["-", "100.0"],
        ["0.50", "100.0"],
    ]


def test_report_no_8bit_parameter_prints_a_dash(tmp_path, capsys):
    write_run(tmp_path, "AdamW")
    write_run(tmp_path, "Adam8bitBlockwise", state_bytes_per_param=None)
    report(tmp_path, "Adam8bitBlockwise", AT_SCALE, "")
    row = next(x for x in capsys.readouterr().out.splitlines() if "Adam8bitBlockwise  " in x)
    assert row.split()[1] == "-"


def test_report_of_int8_weights_has_their_bytes_in_the_table(tmp_path, capsys):
    write_run(tmp_path, "AdamW")
    write_run(tmp_path, "Adam8bitBlockwise", weights="int8", weight_bytes_per_param=1.1579)
    report(tmp_path, "Adam8bitBlockwise", AT_SCALE, "")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["AdamW", "4.000"] in [line[:2] for line in lines]
    assert ["Adam8bitBlockwise", "1.158"] in [line[:2] for line in lines]


@pytest.mark.parametrize(
    ("codec", "weights", "expected"),
    [
        (None, "float32", "SGD"),
        ("log", "float32", "SGD (log)"),
        ("log", "int8", "SGD (log, INT8 weights)"),
    ],
)
def test_label_of_a_run_has_its_codec_and_its_weights_if_they_are_int8(codec, weights, expected):
    assert label({"optimizer": "SGD", "codec": codec, "weights": weights}) == expected


@pytest.mark.parametrize("has_bytes", [True, False], ids=["equal", "of an earlier version"])
def test_report_of_runs_with_equal_weights_has_no_column_of_their_bytes(
    tmp_path, capsys, has_bytes
):
    for optimizer in ("AdamW", "Adam8bitBlockwise"):
        write_run(tmp_path, optimizer)
        path = tmp_path / f"{optimizer}.json"
        run = json.loads(path.read_text())
        if not has_bytes:
            del run["weights"], run["weight_bytes_per_param"]
        path.write_text(json.dumps(run))
    report(tmp_path, "Adam8bitBlockwise", AT_SCALE, "")
    printed = capsys.readouterr().out
    assert "weight bytes/param" not in printed and "AdamW              8.000" in printed


@pytest.mark.parametrize(("optimizer", "twin"), TWINS.items())
def test_report_of_a_folder_with_all_runs_names_the_two_of_the_optimizer(
    tmp_path, capsys, optimizer, twin
):
    for name in (*TWINS, *TWINS.values()):
        write_run(tmp_path, name)
    summary = report(tmp_path, optimizer, {**AT_SCALE, "rows": []}, "")
    assert [run["optimizer"] for run in summary["runs"]] == [twin, optimizer]
    assert f"validation loss of {optimizer} against {twin}: +0.00 %" in capsys.readouterr().out


@pytest.mark.parametrize(("optimizer", "twin"), TWINS.items())
def test_report_missing_run_raises(tmp_path, optimizer, twin):
    write_run(tmp_path, twin)
    with pytest.raises(ValueError, match=rf"found no .*{optimizer}\.json"):
        report(tmp_path, optimizer, AT_SCALE, "")


def test_report_runs_of_different_seeds_raises(tmp_path):
    write_run(tmp_path, "AdamW")
    write_run(tmp_path, "Adam8bitBlockwise", seed=1)
    with pytest.raises(ValueError, match="different seed: 0 and 1"):
        report(tmp_path, "Adam8bitBlockwise", AT_SCALE, "")


@pytest.mark.parametrize(
    "optimizer", ["Lion8bitBlockwise", "SGD8bitBlockwise", "Muon8bitBlockwise"]
)
def test_record_of_an_optimizer_is_its_row_in_the_page_of_algorithms(optimizer):
    twin = TWINS[optimizer]
    path = ROOT / "benchmarks" / "records" / f"demo_{twin.lower()}_cpu_202611.json"
    runs = json.loads(path.read_text())["runs"]
    assert [run["optimizer"] for run in runs] == [twin, optimizer]
    fp32, quantized = (run["val_loss"] for run in runs)
    cells = [f"{fp32:.4f}", f"{quantized:.4f}", f"{100 * (quantized / fp32 - 1):+.2f} %"]
    cells += [f"{run['state_bytes'] / 2**20:.2f}" for run in runs]
    row = f"| `{optimizer}` | {' | '.join(cells)} |"
    assert row in (ROOT / "docs" / "algorithms.md").read_text()
