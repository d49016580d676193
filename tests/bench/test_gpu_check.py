# SPDX-License-Identifier: Apache-2.0
"""The check of everything on a GPU, with other commands in the place of its own."""

import json
import sys

from places import ROOT, TESTS

from benchmarks import gpu_check
from benchmarks.gpu_check import FAILED, NOT_RUN, PASSED, Part

PARTS = {
    "print('what went wrong'); raise SystemExit(7)": FAILED,
    "print('2 skipped')": NOT_RUN,
    "print('well')": PASSED,
}


def test_gpu_check_goes_on_after_a_failure_and_ends_with_status_1(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "RUNS", tmp_path / "runs")
    parts = [Part(f"part{n}", [sys.executable, "-c", code], 60) for n, code in enumerate(PARTS)]
    assert gpu_check.check(parts, tmp_path / "gpu", "NVIDIA Made Up") == 1
    rows = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [row["status"] for row in rows] == list(PARTS.values())
    assert rows[0]["reason"] == "exit status 7: what went wrong"


def test_gpu_check_parts_run_every_test_of_gpus():
    words = [word for one in gpu_check.parts(ROOT / "gpu") for word in one.command]
    run = [ROOT / word for word in words if word.startswith("tests/")]
    marked = [path for path in TESTS.rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    marked.remove(TESTS / "bench" / "test_gpu_check.py")
    assert len(marked) >= 6
    assert [path for path in marked if not any(path.is_relative_to(one) for one in run)] == []
    assert all(path.exists() for path in [*run, gpu_check.RECORDS])
