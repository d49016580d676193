# SPDX-License-Identifier: Apache-2.0
"""`zero8 bench` times every step that it names, in turns."""

import json
import sys

import pytest

from zero8 import bench, cli

NUMEL = 2**16
NAMES = ("DeepSpeedCPUAdam", "torch AdamW, fused", "torch AdamW, foreach")
OURS, THEIRS = {"fp32": 16, "bf16": 10}, {"fp32": 28, "bf16": 14}
"""Bytes per parameter."""


@pytest.fixture
def two_rounds(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 2)


def test_bench_has_a_row_for_every_step_with_its_bytes(two_rounds, capsys):
    words = ["bench", "--numel", str(NUMEL), "--threads", "1"]
    assert cli.main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["numel"], result["threads"], result["missing"]) == (NUMEL, 1, {})
    found = {(r["name"], r["dtype"]): r["gb_per_s"] * r["ns_per_param"] for r in result["rows"]}
    for dtype in OURS:
        assert found.pop(("zero8", dtype)) == pytest.approx(OURS[dtype])
        assert found.pop(("copy of zero8's bytes", dtype)) == pytest.approx(OURS[dtype])
    assert found == pytest.approx({(n, dtype): THEIRS[dtype] for dtype in OURS for n in NAMES})


def test_bench_without_deepspeed_says_so_and_times_the_others(two_rounds, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)
    assert cli.main(["bench", "--numel", str(NUMEL)]) == 0
    printed = capsys.readouterr().out
    assert "without DeepSpeedCPUAdam: ModuleNotFoundError" in printed
    assert "torch AdamW, fused, fp32" in printed
