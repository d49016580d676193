# SPDX-License-Identifier: Apache-2.0
"""The check of everything on a GPU, with other commands in the place of its own."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from places import FOLDERS, ROOT, TESTS
from processes import wait_until

from benchmarks import gpu, gpu_check
from benchmarks.gpu_check import FAILED, NOT_RUN, PASSED, Part

MACHINE = {"gpu": "NVIDIA Made Up", "driver": "580.1", "cuda": "13.0"}


def part(name, code, limit_s=60):
    return Part(name, [sys.executable, "-c", code], limit_s)


GOOD = part("good", "print('well')")


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return a function that runs parts and returns the exit status and the rows of the record."""
    monkeypatch.setattr(gpu_check, "RUNS", tmp_path / "runs")

    def run(*chosen):
        status = gpu_check.check(chosen, tmp_path / "gpu", MACHINE)
        return status, json.loads((tmp_path / "gpu.json").read_text())["parts"]

    return run


def test_gpu_check_all_passed_is_status_0_and_recorded(check, tmp_path, capsys):
    status, rows = check(GOOD, GOOD)
    assert status == 0
    assert [(row["status"], row["reason"]) for row in rows] == [(PASSED, "well")] * 2
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["status"] == PASSED and record["machine"] == MACHINE
    assert {"commit", "versions", "cpu", "seconds"} <= record.keys()
    assert "gpu-check on NVIDIA Made Up: passed" in capsys.readouterr().out


def test_gpu_check_goes_on_after_a_failure_and_ends_with_status_1(check):
    bad = part("bad", "print('what went wrong'); raise SystemExit(7)")
    status, rows = check(bad, part("skipped", "print('2 skipped')"), GOOD)
    assert status == 1
    assert [row["status"] for row in rows] == [FAILED, NOT_RUN, PASSED]
    assert rows[0]["reason"] == "exit status 7: what went wrong"


def test_gpu_check_record_after_each_part_says_that_not_all_has_run(check, tmp_path):
    look = part("look", f"print(open({str(tmp_path / 'gpu.json')!r}).read())")
    assert check(GOOD, look)[0] == 0
    so_far = json.loads((tmp_path / "runs" / "look.log").read_text())
    assert [row["name"] for row in so_far["parts"]] == ["good"]
    assert so_far["status"] == NOT_RUN


TEST_FILES = {
    "passed": ("def test_one(): pass", 0),
    "skipped": ("import pytest\ndef test_one(): pass\ndef test_two(): pytest.skip('no')", 3),
    "failed": ("def test_one(): assert False", 1),
    "none": ("", 1),
}


@pytest.mark.parametrize(("code", "expected"), TEST_FILES.values(), ids=TEST_FILES)
def test_gpu_check_tests_pass_if_some_have_run_and_none_was_skipped(
    check, tmp_path, code, expected
):
    path = tmp_path / "test_some.py"
    path.write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={tmp_path}", str(path)]
    assert check(Part("tests", command, 60))[0] == expected


# --- Time limits ---------------------------------------------------------------------------------

# A process in a session of its own, as torchrun's ranks are, one in the group, and then nothing.
HANGING = """
import subprocess, sys, time
for own in (True, False):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", MARK],
                     start_new_session=own)
print("started", flush=True)
time.sleep(600)
"""


def marked(mark):
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if mark in line]


@pytest.mark.slow
def test_gpu_check_part_that_hangs_is_stopped_with_all_it_has_started(check, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "LEAST_S", 1)
    mark = str(tmp_path / "mark")
    status, rows = check(part("hanging", HANGING.replace("MARK", repr(mark)), limit_s=4), GOOD)
    assert status == 1
    assert [row["status"] for row in rows] == [FAILED, PASSED]
    assert rows[0]["reason"] == "stopped: out of time"
    assert (tmp_path / "runs" / "hanging.log").read_text() == "started\n"
    wait_until(lambda: not marked(mark))


@pytest.mark.slow
def test_gpu_check_command_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.5)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    began = time.monotonic()
    assert gpu_check.run_limited([sys.executable, "-c", code], tmp_path / "log", 2) is None
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_gpu_check_that_is_terminated_stops_its_part(tmp_path):
    mark = str(tmp_path / "mark")
    script = f"""
import sys
sys.path[:0] = {[str(ROOT), *FOLDERS]!r}
import test_gpu_check as t
from pathlib import Path
t.gpu.absence, t.gpu.machine = lambda: None, lambda: t.MACHINE
t.gpu_check.RECORDS = t.gpu_check.RUNS = Path({str(tmp_path)!r})
code = t.HANGING.replace("MARK", {mark!r}.__repr__())
t.gpu_check.parts = lambda base: [t.part("hanging", code)]
t.gpu_check.main([])
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_until(lambda: len(marked(mark)) == 4)  # this script, the part, and what it has started
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not marked(mark))


def test_gpu_check_part_runs_in_the_time_that_is_left_if_that_is_enough(check, monkeypatch):
    monkeypatch.setattr(gpu_check, "TOTAL_S", 30)
    status, (row,) = check(GOOD)
    assert status == 0 and row["limit_s"] in (29, 30)
    monkeypatch.setattr(gpu_check, "TOTAL_S", gpu_check.LEAST_S - 1)
    status, (row,) = check(GOOD)
    assert status == 3 and row["reason"] == "no time left of 9 s"


# --- The command ---------------------------------------------------------------------------------


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """A machine that has one, with three parts and the folder of the records."""
    monkeypatch.setattr(gpu, "absence", lambda: None)
    monkeypatch.setattr(gpu, "machine", lambda: MACHINE)
    monkeypatch.setattr(gpu_check, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(gpu_check, "RECORDS", tmp_path)
    three = [part(name, "print('well')") for name in ("one", "two", "three")]
    monkeypatch.setattr(gpu_check, "parts", lambda base: three)
    return tmp_path


def test_gpu_check_with_parts_runs_these_in_their_order(on_a_gpu):
    assert gpu_check.main(["--parts", "three", "one"]) == 0
    (path,) = on_a_gpu.glob("*.json")
    assert [row["name"] for row in json.loads(path.read_text())["parts"]] == ["one", "three"]


def test_gpu_check_with_an_unknown_part_is_refused_with_the_names(on_a_gpu, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--parts", "one", "four"])
    assert "got --parts four, expected some of one two three" in capsys.readouterr().err


def test_gpu_check_parts_run_every_test_of_gpus():
    words = [word for one in gpu_check.parts(ROOT / "gpu") for word in one.command]
    run = [ROOT / word for word in words if word.startswith("tests/")]
    marked = [path for path in TESTS.rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    marked.remove(TESTS / "bench" / "test_gpu_check.py")
    assert len(marked) >= 6
    assert [path for path in marked if not any(path.is_relative_to(one) for one in run)] == []
    assert all(path.exists() for path in [*run, gpu_check.RECORDS])


def test_gpu_check_record_is_named_after_gpu_and_month_and_replaces_none(tmp_path):
    first = gpu_check.record_base(tmp_path, "NVIDIA H200 (80 GB)")
    assert first.name == f"gpu_nvidia_h200_80_gb_{time.strftime('%Y%m')}"
    for number in (2, 3):
        gpu_check.record_base(tmp_path, "NVIDIA H200 (80 GB)").with_suffix(".json").touch()
        following = gpu_check.record_base(tmp_path, "NVIDIA H200 (80 GB)")
        assert following.name == f"{first.name}_run{number}"


def test_gpu_check_without_a_gpu_is_status_2_and_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_check, "RECORDS", tmp_path)
    assert gpu_check.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu-check: looked for a CUDA device with torch")
    assert "and found none; nvidia-smi: " in line and not list(tmp_path.iterdir())


def fake_smi(folder, script):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_gpu_check_without_a_gpu_says_what_nvidia_smi_finds(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fake_smi(tmp_path, "echo 'NVIDIA Made Up, 580.1'")
    assert gpu.absence().endswith("nvidia-smi: NVIDIA Made Up, 580.1")
    fake_smi(tmp_path, "exit 9")
    assert gpu.absence().endswith("nvidia-smi: not there, or without a GPU")
