# SPDX-License-Identifier: Apache-2.0
"""The measurement of whole engines: every contender is timed, and what a rank sends is counted."""

import json

import pytest

from benchmarks.engine import __main__ as command
from benchmarks.engine import contenders, engines
from zero8.spec.adam import ADAM

ENGINES = ("ZeRO-2", "ZeRO-3", "FSDP2")
CONTENDERS = contenders.CONTENDERS[ADAM.name]
SIDE = 64


def measured(out, *words):
    """Measure small engines in this process; return the status."""
    engines.SIDES.update(dict.fromkeys(engines.SIDES, SIDE))
    sizes = ["--numel", 2 * SIDE**2, "--rounds", 2, "--threads", 1, "--clipping", "1.0"]
    return command.main([str(word) for word in ("--json", out, *sizes, *words)])


def measured_adam(out):
    return measured(out, "--engines", ",".join(ENGINES))


@pytest.mark.slow
def test_engine_times_every_contender_of_every_engine(standing_ranks, tmp_path):
    out = tmp_path / "engine.json"
    assert standing_ranks(1).run(measured_adam, timeout_s=300, out=str(out)) == [0]
    rows, table = json.loads(out.read_text())["rows"], out.with_suffix(".md").read_text()
    names = [(name, one.name) for name in ENGINES for one in CONTENDERS[name]]
    assert [(row["engine"], row["name"]) for row in rows] == names
    for row in rows:
        assert 0 < row["inner_ms"] < row["phase_ms"]
        assert (row["ratio"] == 1.0) is (row["name"] == row["over"])
        assert f"| {row['engine']}, clipped at 1, {row['name']} | {row['phase_ms']:.1f} |" in table
