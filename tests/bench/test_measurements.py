# SPDX-License-Identifier: Apache-2.0
"""The measurements of steps, engines and host memory: right and whole, whatever the times are."""

import json

import pytest
from places import ROOT
from ranks import run_ranks

from benchmarks import host_memory
from benchmarks.engine import __main__ as engine_command
from benchmarks.engine import engines, in_forward
from benchmarks.step import __main__ as step_command
from benchmarks.step.contenders import ZERO8
from zero8.spec.adam import ADAM

# Bytes that a step moves per parameter.
STREAMS = {
    "adam": {"fp32": 16, "bf16": 10, "bf16_corrected": 12},
    "sgd": {"fp32": 14, "bf16": 8, "bf16_corrected": 10},
}
CONTENDERS = engines.CONTENDERS[ADAM.name]
ENGINES = ("ZeRO-2", "ZeRO-3", "FSDP2")
SIDE = 64


def test_steps_have_a_row_each_and_a_copy_of_their_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(step_command, "ROUNDS", 2)
    out = tmp_path / "new" / "step.json"
    words = ["--json", out, "--numel", 2**16, "--threads", 1, "--algorithm", "adam,sgd"]
    words += ["--codec", "log,linear4", "--against", "deepspeed,torch"]
    assert step_command.main(list(map(str, words))) == 0
    result, table = json.loads(out.read_text()), out.with_suffix(".md").read_text()
    assert result["skipped"] == {} and result["command"].startswith("python -m benchmarks.step")
    rows = {(r["algorithm"], r["name"], r["variant"], r["codec"]): r for r in result["rows"]}
    for algorithm, streams in STREAMS.items():
        moments = len(ZERO8[algorithm].algorithm.moments)
        for variant, num_bytes in streams.items():
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


def measure_engines(out):
    """Measure small engines in this process; return the status."""
    engines.SIDES.update(dict.fromkeys(engines.SIDES, SIDE))
    words = ["--json", out, "--engines", ",".join(ENGINES), "--numel", 2 * SIDE**2]
    words += ["--rounds", 2, "--threads", 1, "--clipping", "1.0"]
    return engine_command.main(list(map(str, words)))


@pytest.mark.slow
def test_engines_time_every_contender(standing_ranks, tmp_path):
    out = tmp_path / "engine.json"
    assert standing_ranks(1).run(measure_engines, timeout_s=300, out=str(out)) == [0]
    rows, table = json.loads(out.read_text())["rows"], out.with_suffix(".md").read_text()
    names = [(name, one.name) for name in ENGINES for one in CONTENDERS[name]]
    assert [(row["engine"], row["name"]) for row in rows] == names
    for row in rows:
        assert 0 < row["inner_ms"] < row["phase_ms"]
        assert (row["ratio"] == 1.0) is (row["name"] == row["over"])
        assert f"| {row['engine']}, clipped at 1, {row['name']} | {row['phase_ms']:.1f} |" in table


def measure_in_forward(out):
    return in_forward.main(["--json", out, "--numel", str(2**16), "--layers", "4"])


@pytest.mark.slow
def test_steps_behind_a_forward_have_a_row_per_ratio_and_a_figure(tmp_path):
    out = tmp_path / "in_forward.json"
    assert run_ranks(measure_in_forward, 1, tmp_path, timeout_s=300, out=str(out)) == [0]
    assert [row["ratio"] for row in json.loads(out.read_text())["rows"]] == [0.5, 1.0, 2.0, 4.0]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def measure_host_memory(numel, folder=None):
    config = json.loads((ROOT / "configs" / "zero3_bf16_masters_offload.json").read_text())
    config["zero_optimization"]["reduce_bucket_size"] = 2**20
    return host_memory.measure(config, numel, 3, width=1024, folder=folder)


@pytest.mark.slow
def test_host_memory_of_a_run_is_measured_beside_its_plan(standing_ranks):
    (found,) = standing_ranks(1).run(measure_host_memory, timeout_s=300, numel=2**25)
    assert found["numel"] == 2**25
    # Weights, gradients and moments; what else the process holds counts, too.
    assert 6 * 2**25 < sum(found["planned_bytes"].values())
    assert found["peak_bytes"] > 6 * 2**25
    assert len(set(found["losses"])) == 3 and found["losses"][2] < found["losses"][0]
    table = host_memory.markdown(found)
    assert f"| **planned** | {sum(found['planned_bytes'].values()) / 2**30:.2f} |" in table


@pytest.mark.slow
def test_host_memory_of_save_and_resume_is_measured_in_processes_of_their_own(tmp_path):
    job = {"numel": 2**21, "folder": tmp_path / "checkpoint"}
    (found,) = run_ranks(measure_host_memory, 1, tmp_path, timeout_s=300, **job)
    phases = ["save", "load", "convert", "load at another number of ranks"]
    assert list(found["peaks_bytes"]) == phases
    assert all(size > 6 * 2**21 for size in found["peaks_bytes"].values())
