# SPDX-License-Identifier: Apache-2.0
"""The step measurement: what it times is right and whole, whatever the times are."""

import json

import pytest

from benchmarks.step import __main__ as command
from benchmarks.step.contenders import ZERO8

NUMEL = 2**16
# Bytes that a step moves per parameter.
STREAMS = {
    "adam": {"fp32": 16, "bf16": 10, "bf16_corrected": 12},
    "sgd": {"fp32": 14, "bf16": 8, "bf16_corrected": 10},
}


@pytest.fixture
def few_rounds(monkeypatch):
    monkeypatch.setattr(command, "ROUNDS", 2)


def test_run_has_a_row_for_every_step_and_a_copy_of_its_bytes(tmp_path, few_rounds):
    out = tmp_path / "new" / "step.json"
    words = ["--json", out, "--numel", NUMEL, "--threads", 1, "--algorithm", "adam,sgd"]
    words += ["--codec", "log,linear4", "--against", "deepspeed,torch"]
    assert command.main(list(map(str, words))) == 0
    result, table = json.loads(out.read_text()), out.with_suffix(".md").read_text()
    assert result["skipped"] == {} and result["command"].startswith("python -m benchmarks.step")
    rows = {(r["algorithm"], r["name"], r["variant"], r["codec"]): r for r in result["rows"]}
    for algorithm in ("adam", "sgd"):
        moments = len(ZERO8[algorithm].algorithm.moments)
        for variant, num_bytes in STREAMS[algorithm].items():
            assert rows[algorithm, "zero8", variant, "log"]["bytes_per_param"] == num_bytes
            narrow = rows[algorithm, "zero8", variant, "linear4"]["bytes_per_param"]
            assert narrow == num_bytes - moments
    peers = {key[:3] for key in rows if key[1] not in ("zero8", "copy")}
    deepspeed = {("adam", "deepspeed", "fp32"), ("adam", "deepspeed", "bf16")}
    assert peers == deepspeed | {("adam", "torch", "fp32"), ("sgd", "torch", "fp32")}
    for row in result["rows"]:
        assert row["of_copy"] == pytest.approx(1) if row["name"] == "copy" else row["of_copy"] > 0
        assert (row["speed_over_deepspeed_fp32"] is None) == (row["algorithm"] == "sgd")
    assert "| zero8 adam fp32 `log` |" in table and "| deepspeed adam bf16 |" in table
