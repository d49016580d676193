# SPDX-License-Identifier: Apache-2.0
"""The check of everything on a GPU, with other commands in the place of its own."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch
from places import FOLDERS, ROOT

from zero8.bench import gpu
from zero8.bench.gpu_check import command as gpu_check
from zero8.bench.gpu_check import parts as gpu_check_parts
from zero8.bench.gpu_check import run as gpu_check_run
from zero8.bench.gpu_check.parts import (
    FAILED,
    NOT_RUN,
    PASSED,
    SANITIZER_ERRORS,
    Part,
    judge_bench,
    judge_sanitizer,
    judge_status,
    judge_tests,
    judge_training,
)
from zero8.bench.step import kernel as step_kernel
from zero8.bench.step.variants import VARIANTS
from zero8.op import cuda, kernel
from zero8.spec.codec import CODECS

MACHINE = {"gpu": "NVIDIA Made Up", "driver": "580.1", "cuda": "13.0"}


def part(name, code, limit_s=60, **others):
    return Part(name, [sys.executable, "-c", code], limit_s, judge_status, **others)


GOOD = part("good", "print('well')")


@pytest.fixture
def check(tmp_path):
    """Return a function that runs parts and returns the exit status and the record."""

    def run(*parts):
        status = gpu_check.check(parts, tmp_path / "runs", tmp_path / "records" / "gpu", MACHINE)
        return status, json.loads((tmp_path / "records" / "gpu.json").read_text())

    return run


# --- The whole -----------------------------------------------------------------------------------


def test_gpu_check_all_passed_is_status_0_and_recorded(check, capsys):
    status, result = check(
        GOOD, part("second", "import os; os.environ['A']", environment={"A": "1"})
    )
    assert status == 0 and result["status"] == PASSED
    assert result["machine"] == MACHINE
    assert {"command", "commit", "versions", "cpu", "seconds"} <= result.keys()
    assert [row["status"] for row in result["parts"]] == [PASSED, PASSED]
    assert result["parts"][1]["command"].startswith("A=1 ")
    assert result["parts"][0]["limit_s"] == 60 and result["parts"][0]["seconds"] < 60
    assert "gpu-check on NVIDIA Made Up: passed" in capsys.readouterr().out


def test_gpu_check_goes_on_after_a_failure_and_ends_with_status_1(check, capsys):
    status, result = check(part("bad", "print('what went wrong'); raise SystemExit(7)"), GOOD)
    assert status == 1 and result["status"] == FAILED
    assert [row["status"] for row in result["parts"]] == [FAILED, PASSED]
    assert result["parts"][0]["reason"] == "exit status 7"
    assert "what went wrong" in capsys.readouterr().out


def test_gpu_check_part_that_cannot_run_is_status_3_with_the_reason(check, capsys):
    status, result = check(GOOD, part("tool", "raise SystemExit(1)", missing="it is not there"))
    assert status == 3 and result["status"] == NOT_RUN
    assert (
        result["parts"][1] | {"reason": "it is not there", "status": NOT_RUN} == result["parts"][1]
    )
    assert "gpu-check on NVIDIA Made Up: not run" in capsys.readouterr().out


def test_gpu_check_failure_counts_more_than_what_has_not_run(check):
    assert check(part("tool", "", missing="gone"), part("bad", "raise SystemExit(1)"))[0] == 1


def test_gpu_check_part_has_the_time_that_is_left_if_that_is_worth_it(tmp_path):
    row = gpu_check.row_of(GOOD, tmp_path, 30.2)
    assert (row["status"], row["limit_s"]) == (PASSED, 30)
    row = gpu_check.row_of(GOOD, tmp_path, gpu_check.LEAST_SECONDS - 1)
    reason = f"no time left of {gpu_check.TOTAL_SECONDS} s"
    assert (row["status"], row["reason"]) == (NOT_RUN, reason)


def test_gpu_check_part_is_given_what_earlier_ones_left(check, monkeypatch):
    seen = []
    monkeypatch.setattr(gpu_check, "row_of", lambda part, runs, left: seen.append(left) or ROW)
    check(GOOD, GOOD)
    assert gpu_check.TOTAL_SECONDS > seen[0] > seen[1] > gpu_check.TOTAL_SECONDS - 60


ROW = {"name": "one", "status": PASSED, "seconds": 1.0, "reason": ""}


def test_gpu_check_record_is_there_after_each_part(check, tmp_path):
    path = tmp_path / "records" / "gpu.json"
    status, result = check(GOOD, part("look", f"print(open({str(path)!r}).read())"))
    so_far = json.loads((tmp_path / "runs" / "look.log").read_text())
    assert [row["name"] for row in so_far["parts"]] == ["good"]
    assert so_far["status"] == NOT_RUN and result["status"] == PASSED


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


def wait_until(condition):
    limit = time.monotonic() + 30
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)
    assert condition()


def test_gpu_check_part_that_hangs_is_stopped_with_all_it_has_started(check, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "LEAST_SECONDS", 1)
    mark = str(tmp_path / "mark")
    began = time.monotonic()
    status, result = check(part("hanging", HANGING.replace("MARK", repr(mark)), limit_s=4), GOOD)
    assert time.monotonic() - began < 4 + gpu_check_run.GRACE_SECONDS + 10
    assert status == 1
    assert [row["status"] for row in result["parts"]] == [FAILED, PASSED]
    assert result["parts"][0]["reason"] == "stopped after 4 s"
    assert (tmp_path / "runs" / "hanging.log").read_text() == "started\n"
    wait_until(lambda: not marked(mark))


def test_gpu_check_command_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check_run, "GRACE_SECONDS", 0.5)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    command = [sys.executable, "-c", code]
    done = gpu_check_run.run_limited(command, {}, tmp_path / "log", 2, tmp_path)
    assert done.status is None and done.seconds < 30


def test_gpu_check_that_is_terminated_stops_its_part(tmp_path):
    mark = str(tmp_path / "mark")
    script = f"""
import sys
sys.path[:0] = {FOLDERS!r}
import test_gpu_check as t
from zero8.bench import gpu
from zero8.bench.gpu_check import command as gpu_check
from pathlib import Path
gpu.absence, gpu.machine = lambda: None, lambda: t.MACHINE
code = t.HANGING.replace("MARK", {repr(mark)!r})
gpu_check.gpu_check_parts.parts = lambda runs, base: [t.part("hanging", code)]
gpu_check.main(["--records", {str(tmp_path)!r}, "--runs", {str(tmp_path)!r}])
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


# --- What is judged ------------------------------------------------------------------------------

TESTS = {
    "passed": ("def test_one(): pass", PASSED, "1 tests, 0 failures, 0 errors, 0 skipped"),
    "skipped": (
        "import pytest\ndef test_one(): pass\ndef test_two(): pytest.skip('there is no GPU')",
        FAILED,
        "2 tests, 0 failures, 0 errors, 1 skipped",
    ),
    "failed": ("def test_one(): assert False", FAILED, "1 tests, 1 failures, 0 errors, 0 skipped"),
    "none": ("", FAILED, "0 tests, 0 failures, 0 errors, 0 skipped"),
}


@pytest.mark.parametrize(("code", "status", "reason"), TESTS.values(), ids=TESTS)
def test_gpu_check_tests_pass_if_some_have_run_and_none_was_skipped(tmp_path, code, status, reason):
    (tmp_path / "test_some.py").write_text(code)
    report = tmp_path / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "--rootdir=."]
    done = subprocess.run([*command, "test_some.py"], cwd=tmp_path, capture_output=True, timeout=60)
    verdict = judge_tests(report, done.returncode, "")
    assert (verdict.status, verdict.reason) == (status, reason)
    assert judge_tests(report, 0, "").status == FAILED  # that of an earlier run does not count


def summary(**changes):
    runs = [{"val_loss": 2.0}, {"val_loss": 2.01}]
    return {"device": "cuda", "runs": runs} | changes


@pytest.mark.parametrize(
    ("status", "changes", "expected"),
    [
        (0, {}, PASSED),
        (1, {}, FAILED),
        (0, {"device": "cpu"}, FAILED),
        (0, {"runs": [{"val_loss": 2.0}, {"val_loss": 2.05}]}, FAILED),
        (0, {"runs": [{"val_loss": 2.0}, {"val_loss": float("nan")}]}, FAILED),
    ],
)
def test_gpu_check_training_passes_on_the_gpu_with_near_losses(tmp_path, status, changes, expected):
    path = tmp_path / "summary.json"
    assert judge_training(path, 0, "").status == FAILED
    path.write_text(json.dumps(summary(**changes)))
    assert judge_training(path, status, "").status == expected


@pytest.mark.parametrize(
    ("status", "met", "expected"), [(0, True, PASSED), (0, False, FAILED), (1, True, FAILED)]
)
def test_gpu_check_measurement_passes_if_its_targets_are_met(tmp_path, status, met, expected):
    path = tmp_path / "step.json"
    assert judge_bench(path, 0, "").status == FAILED
    skipped = [{"name": "flashoptim", "reason": "not there"}]
    checks = [{"target": "fast", "met": met}]
    path.write_text(json.dumps({"checks": checks, "skipped": skipped}))
    verdict = judge_bench(path, status, "")
    assert verdict.status == expected
    assert verdict.result["missed"] == ([] if met else ["fast"])
    assert verdict.result["skipped"] == skipped


@pytest.mark.parametrize(
    ("status", "output", "expected", "reason"),
    [
        (0, "========= ERROR SUMMARY: 0 errors", PASSED, "ERROR SUMMARY: 0 errors"),
        (
            SANITIZER_ERRORS,
            "========= Invalid __global__ write of size 4\n========= ERROR SUMMARY: 3 errors",
            FAILED,
            f"exit status {SANITIZER_ERRORS}, ERROR SUMMARY: 3 errors",
        ),
        (
            SANITIZER_ERRORS,
            "========= Unable to print more\n========= ERROR SUMMARY: 3 errors",
            FAILED,
            f"exit status {SANITIZER_ERRORS}, ERROR SUMMARY: 3 errors",
        ),
        (0, "nothing was looked at", FAILED, "exit status 0, without a summary"),
        (1, "========= COMPUTE-SANITIZER\nTraceback", FAILED, "exit status 1, without a summary"),
        (
            255,
            "========= COMPUTE-SANITIZER\n========= Device not supported\nerror 999",
            NOT_RUN,
            "compute-sanitizer: Device not supported",
        ),
    ],
)
def test_gpu_check_sanitizer_is_judged_by_its_summary(status, output, expected, reason):
    verdict = judge_sanitizer(status, output)
    assert (verdict.status, verdict.reason) == (expected, reason)


# --- The parts -----------------------------------------------------------------------------------


def test_gpu_check_parts_are_these_and_their_files_lie_beside_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check_parts, "sanitizer", lambda: "/cuda/bin/compute-sanitizer")
    parts = {p.name: p for p in gpu_check_parts.parts(tmp_path, tmp_path / "gpu_x_202611")}
    assert list(parts) == [
        "build", "tests", "fsdp", "zero", "memcheck", "train_offload", "train_on_gpu", "bench",
        "racecheck", "initcheck",
    ]  # fmt: skip
    assert f"{tmp_path}/gpu_x_202611_step.json" in parts["bench"].text
    for name, path, _ in gpu_check_parts.TESTS:
        assert f"-m pytest {path} -m gpu" in parts[name].text
    assert "CONFIG=configs/zero2_offload.json" in parts["train_offload"].text
    assert "CONFIG=configs/zero2_bf16.json" in parts["train_on_gpu"].text
    assert "--tool racecheck" in parts["racecheck"].text
    assert not any(p.missing for p in parts.values())
    for name in (gpu_check_parts.OFFLOAD, gpu_check_parts.ON_GPU):
        assert (gpu_check_parts.ROOT / name).is_file()


def test_gpu_check_runs_all_tests_of_gpus():
    paths = [ROOT / path for _, path, _ in gpu_check_parts.TESTS]
    marked = [
        path
        for path in (ROOT / "tests").glob("*/test_*.py")
        if "pytestmark = [\n    pytest.mark.gpu," in path.read_text()
    ]
    assert len(marked) == 4
    assert all(any(path.is_relative_to(tested) for tested in paths) for path in marked)


def test_gpu_check_runs_the_parts_that_it_is_asked_for_and_refuses_others(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(gpu, "absence", lambda: None)
    monkeypatch.setattr(gpu, "machine", lambda: MACHINE)
    parts = [replace(part, name=name) for name in ("one", "two", "three") for part in [GOOD]]
    monkeypatch.setattr(gpu_check_parts, "parts", lambda runs, base: parts)
    folders = ["--records", str(tmp_path / "records"), "--runs", str(tmp_path / "runs")]
    assert gpu_check.main([*folders, "--parts", "three", "one"]) == 0
    (path,) = (tmp_path / "records").glob("*.json")
    assert [part["name"] for part in json.loads(path.read_text())["parts"]] == ["one", "three"]
    with pytest.raises(SystemExit):
        gpu_check.main([*folders, "--parts", "one", "four"])
    assert "got --parts four, expected some of one two three" in capsys.readouterr().err


def test_gpu_check_parts_without_compute_sanitizer_say_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if gpu_check_parts.sanitizer() is None:  # it may be in CUDA's usual folder
        parts = gpu_check_parts.parts(tmp_path, tmp_path)
        assert [p.name for p in parts if p.missing] == ["memcheck", "racecheck", "initcheck"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "compute-sanitizer").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "compute-sanitizer").chmod(0o755)
    assert gpu_check_parts.sanitizer() == str(tmp_path / "bin" / "compute-sanitizer")


def test_gpu_check_small_case_of_the_sanitizer_is_a_program(monkeypatch):
    """All but what it runs on, which is a GPU."""
    stepped = []
    on_the_cpu = gpu_check_parts.SMALL_CASE.replace('"cuda"', '"cpu"')
    monkeypatch.setattr(step_kernel, "CUDA_VARIANTS", VARIANTS)
    monkeypatch.setattr(step_kernel, "BLOCK_SIZE", step_kernel.BLOCK_SIZE)

    def step(segments):
        kernel.step(segments)
        stepped.extend(segment.grid.block_size for segment in segments)

    monkeypatch.setattr(cuda, "step", step)
    exec(on_the_cpu, {})
    each = len(CODECS) * len(VARIANTS) * step_kernel.CHECK_STEPS
    assert stepped == each * [256] + each * [512] + each * [4096]


def test_gpu_check_record_is_named_after_gpu_and_month_and_replaces_none(tmp_path):
    first = gpu_check.record_base(tmp_path, "NVIDIA H200 (80 GB)")
    assert first.name == f"gpu_nvidia_h200_80_gb_{time.strftime('%Y%m')}"
    first.with_suffix(".json").touch()
    second = gpu_check.record_base(tmp_path, "NVIDIA H200 (80 GB)")
    assert second.name == f"{first.name}_run2"
    second.with_suffix(".json").touch()
    assert gpu_check.record_base(tmp_path, "NVIDIA H200 (80 GB)").name == f"{first.name}_run3"


def test_gpu_check_without_a_gpu_is_status_2_and_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--records", str(tmp_path), "--runs", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu-check: looked for a CUDA device with torch")
    assert "and found none; nvidia-smi: " in line and not list(tmp_path.iterdir())


def fake_smi(folder, script):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_gpu_check_says_what_nvidia_smi_finds(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fake_smi(tmp_path, "echo 'NVIDIA Made Up, 580.1'")
    assert gpu.absence().endswith("nvidia-smi: NVIDIA Made Up, 580.1")
    fake_smi(tmp_path, "exit 9")
    assert gpu.absence().endswith("nvidia-smi: not there, or without a GPU")
