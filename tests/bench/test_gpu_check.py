# SPDX-License-Identifier: Apache-2.0
"""The check of everything on a GPU, with other commands in the place of its own."""

import json
import sys

import pytest
from places import ROOT, TESTS

from benchmarks import gpu_check
from benchmarks.gpu_check import FAILED, NOT_RUN, PASSED, Part

GPU = "NVIDIA Made Up"


def part(name, code, limit_s=60):
    return Part(name, [sys.executable, "-c", code], limit_s)


GOOD = part("good", "print('well')")


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return a function that runs parts and returns the exit status and the rows of the record."""
    monkeypatch.setattr(gpu_check, "RUNS", tmp_path / "runs")

    def run(*chosen):
        status = gpu_check.check(chosen, tmp_path / "gpu", GPU)
        return status, json.loads((tmp_path / "gpu.json").read_text())["parts"]

    return run


def test_gpu_check_goes_on_after_a_failure_and_ends_with_status_1(check):
    bad = part("bad", "print('what went wrong'); raise SystemExit(7)")
    status, rows = check(bad, part("skipped", "print('2 skipped')"), GOOD)
    assert status == 1
    assert [row["status"] for row in rows] == [FAILED, NOT_RUN, PASSED]
    assert rows[0]["reason"] == "exit status 7: what went wrong"


# --- The command ---------------------------------------------------------------------------------


def test_gpu_check_parts_run_every_test_of_gpus():
    words = [word for one in gpu_check.parts(ROOT / "gpu") for word in one.command]
    run = [ROOT / word for word in words if word.startswith("tests/")]
    marked = [path for path in TESTS.rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    marked.remove(TESTS / "bench" / "test_gpu_check.py")
    assert len(marked) >= 6
    assert [path for path in marked if not any(path.is_relative_to(one) for one in run)] == []
    assert all(path.exists() for path in [*run, gpu_check.RECORDS])
