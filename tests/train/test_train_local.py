# SPDX-License-Identifier: Apache-2.0
"""launch/local.sh from its settings to its summary, and to its end by a signal."""

import json
import signal
import sys

import psutil
import pytest
from places import ROOT
from processes import run, started
from ranks import build_ops

from examples.gpt.engines import TWINS
from zero8 import cli

COMMAND = ["bash", str(ROOT / "launch" / "local.sh")]
# Seconds.
TIME_LIMIT = 280
STOP_LIMIT = 60


@pytest.fixture(scope="module", autouse=True)
def ops():
    """Build the ops here: a test that stops the script must not stop a build with it."""
    build_ops()


@pytest.fixture
def settings(tmp_path):
    """The environment of a short run on a small text."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(4):
        (text / f"{i}.txt").write_text(f"line {i} of a small text\n" * 50)
    run_settings = {"STEPS": "4", "RANKS": "2", "SEED": "1", "DATA": str(text)}
    programs = {"PYTHON": sys.executable, "DS_ACCELERATOR": "cpu"}
    return {**run_settings, **programs, "OUT": str(tmp_path / "out")}


@pytest.mark.slow
@pytest.mark.timeout(TIME_LIMIT + 2 * STOP_LIMIT)
@pytest.mark.parametrize(
    ("optimizer", "fp32_bytes", "bytes_8bit"),
    [
        ("Adam8bitBlockwise", 8, 2.1),
        # Of AdamW's parameters, which are no matrices, there are two moments.
        ("Muon8bitBlockwise", 7_135_232 / 1_678_336, 1.08),
    ],
)
def test_local_sh_four_steps_writes_summary_of_both_runs(
    tmp_path, settings, optimizer, fp32_bytes, bytes_8bit
):
    twin, out = TWINS[optimizer], tmp_path / "out"
    done = run(COMMAND, TIME_LIMIT, **settings, OPTIMIZER=optimizer)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["ranks"], summary["seed"], summary["steps"]) == (2, 1, 4)
    baseline, eight_bit = summary["runs"]
    assert (baseline["optimizer"], eight_bit["optimizer"]) == (twin, optimizer)
    assert baseline["state_bytes_per_param"] == fp32_bytes
    assert eight_bit["state_bytes_per_param"] < bytes_8bit
    # Same seed, same batches: the first two steps have learning rate 0.
    assert baseline["val_loss"] == pytest.approx(eight_bit["val_loss"], rel=1e-3)
    assert (out / "loss.png").exists()
    assert cli.main(["checkpoint", "verify", f"{out}/{optimizer}.checkpoint"]) == 0
    # The screen has progress and results; warnings are in the logs.
    assert f"{optimizer}: 100%" in output and "iteration ms" in output
    assert "WARNING" not in output and "Warning" not in output
    logs = [out / f"{name}.rank{rank}.log" for name in (twin, optimizer) for rank in range(2)]
    assert all("less than warmup_num_steps" in log.read_text() for log in logs)


def processes_of(out):
    """Return the command lines of the running processes that name this folder."""
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(out) in line]


@pytest.mark.slow
@pytest.mark.timeout(TIME_LIMIT + 2 * STOP_LIMIT)
def test_local_sh_sigterm_while_training_leaves_no_rank(tmp_path, settings):
    settings |= {"STEPS": "100000", "ENGINE": "fsdp2"}  # which starts sooner
    with started(COMMAND, **settings) as process:
        while not process.stdout.readline().startswith("data:"):
            assert process.poll() is None
        assert len(processes_of(tmp_path / "out")) >= 3  # torchrun and its two ranks
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=STOP_LIMIT)
    assert process.returncode == 130, output
    assert processes_of(tmp_path / "out") == []
