# SPDX-License-Identifier: Apache-2.0
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from places import ROOT
from ranks import build_ops

from examples.gpt.engines import TWINS
from zero8 import cli

# Seconds.
TIME_LIMIT = 280
STOP_LIMIT = 60


@pytest.fixture(scope="module", autouse=True)
def ops():
    """Build the ops here: a test that stops the script must not stop a build with it."""
    build_ops()


def stop(process):
    """End the script with its ranks; kill its process group if that hangs."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=STOP_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def start_local(tmp_path):
    """Return a function that starts launch/local.sh on a small text; afterwards, stop it."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(4):
        (text / f"{i}.txt").write_text(f"line {i} of a small text\n" * 50)
    environment = {
        **os.environ,
        "STEPS": "4",
        "RANKS": "2",
        "DATA": str(text),
        "OUT": str(tmp_path / "out"),
        "SEED": "1",
        "PYTHON": sys.executable,
        "DS_ACCELERATOR": "cpu",
    }
    started = []

    def start(**overrides):
        process = subprocess.Popen(
            ["bash", str(ROOT / "launch" / "local.sh")],
            env={**environment, **overrides},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            stop(process)


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
    tmp_path, start_local, optimizer, fp32_bytes, bytes_8bit
):
    twin = TWINS[optimizer]
    process = start_local(OPTIMIZER=optimizer)
    output = process.communicate(timeout=TIME_LIMIT)[0]
    assert process.returncode == 0, output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["ranks"], summary["seed"], summary["steps"]) == (2, 1, 4)
    assert summary["data"]["files"] == 4
    baseline, eight_bit = summary["runs"]
    assert baseline["optimizer"] == twin
    assert baseline["state_bytes_per_param"] == fp32_bytes
    assert eight_bit["optimizer"] == optimizer
    assert eight_bit["state_bytes_per_param"] < bytes_8bit
    # Same seed, same batches: the first two steps have learning rate 0.
    assert baseline["val_loss"] == pytest.approx(eight_bit["val_loss"], rel=1e-3)
    assert (tmp_path / "out" / "loss.png").exists()
    assert cli.main(["checkpoint", "verify", f"{tmp_path}/out/{optimizer}.checkpoint"]) == 0
    # The screen has progress and results; warnings are where it says.
    assert f"{optimizer}: 100%" in output and "iteration ms" in output
    assert "WARNING" not in output and "Warning" not in output
    assert f"{tmp_path}/out/{twin}.rank*.log" in output
    for name in (twin, optimizer):
        for rank in range(2):
            log = (tmp_path / "out" / f"{name}.rank{rank}.log").read_text()
            assert "total_num_steps 4 is less than warmup_num_steps" in log


@pytest.mark.parametrize(
    "settings",
    [
        {"ENGINE": "fsdp"},
        {"OPTIMIZER": "Lion"},
        {"ENGINE": "deepspeed", "WEIGHTS": "int8"},
        {"ENGINE": "fsdp2", "OPTIMIZER": "Muon8bitBlockwise"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_local_sh_invalid_settings_exit_with_where_the_valid_ones_are(start_local, settings):
    process = start_local(**settings)
    output = process.communicate(timeout=STOP_LIMIT)[0]
    chosen = {"ENGINE": "deepspeed", "OPTIMIZER": "Adam8bitBlockwise", "WEIGHTS": "float32"}
    named = " ".join(f"{name}={value}" for name, value in {**chosen, **settings}.items())
    assert process.returncode == 2
    assert output == f"zero8: got {named}, expected what --help lists\n"


def processes_of(out):
    """Return the command lines of the running processes that name this folder."""
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(out) in line]


@pytest.mark.slow
@pytest.mark.timeout(TIME_LIMIT + 2 * STOP_LIMIT)
def test_local_sh_sigterm_while_training_leaves_no_rank(tmp_path, start_local):
    process = start_local(STEPS="100000", ENGINE="fsdp2")  # which starts sooner
    for line in process.stdout:
        if line.startswith("data:"):
            break
    assert len(processes_of(tmp_path / "out")) >= 3  # torchrun and its two ranks
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=STOP_LIMIT)[0]
    assert process.returncode == 130, output
    assert processes_of(tmp_path / "out") == []
