# SPDX-License-Identifier: Apache-2.0
"""The measurement of whole engines: every contender is timed, and what a rank sends is counted."""

import json

import pytest
import torch
from torch import distributed

from benchmarks.engine import __main__ as command
from benchmarks.engine import contenders, engines
from benchmarks.engine.sent import sent_by
from examples.gpt.engines import join_ranks
from zero8.spec.adam import ADAM
from zero8.spec.muon import MUON

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


def measured_muon(out):
    # Of three matrices the boundary between two ranks cuts one.
    return measured(out, "--algorithm", "muon", "--numel", 3 * SIDE**2)


def sent_bytes():
    """Return the bytes that this rank sends in each of some collectives."""
    join_ranks()
    x, out, whole = torch.ones(6), torch.empty(6), torch.empty(12)
    numels = [[5, 1], [3, 3]]  # that each rank sends to each
    mine = numels[distributed.get_rank()]
    arriving = [row[distributed.get_rank()] for row in numels]
    calls = {
        "all-gather": lambda: distributed.all_gather_into_tensor(whole, x),
        "all-to-all": lambda: distributed.all_to_all_single(out, x),
        "uneven": lambda: distributed.all_to_all_single(
            torch.empty(sum(arriving)), x, arriving, mine
        ),
        "all-reduce": lambda: distributed.all_reduce(x),
    }
    found = {name: sent_by(call) for name, call in calls.items()}
    try:
        sent_by(lambda: distributed.broadcast(x, 0))
    except NotImplementedError as error:
        found["error"] = str(error)
    return found


def test_sent_bytes_are_those_that_go_to_other_ranks(standing_ranks):
    first, second = standing_ranks(2).run(sent_bytes)
    same = {"all-gather": 24, "all-to-all": 12, "all-reduce": 24}
    error = "broadcast_: the bytes of this collective are not counted"
    assert first == same | {"uneven": 4, "error": error}
    assert second == same | {"uneven": 12, "error": error}


# By engine what DeepSpeed's Muon sends, and zero8's in float32, in bytes per element of a matrix.
# ZeRO-2: half of all gradients and moments in float32; a half of one update, and one back.  ZeRO-3:
# half of them in bfloat16; halves of three updates.
SENT = {"ZeRO-2": (3 / 2 * 8, 2 / 2 * 4 / 2), "ZeRO-3": (3 / 2 * 4, 3 / 2 * 4)}


@pytest.mark.slow
def test_bytes_that_muon_and_deepspeeds_send_are_those_that_the_page_says(standing_ranks, tmp_path):
    out = tmp_path / "muon.json"
    assert standing_ranks(2).run(measured_muon, timeout_s=400, out=str(out)) == [0, 0]
    rows = json.loads(out.read_text())["rows"]
    sent = {(row["engine"], row["name"]): 3 * SIDE**2 * row["sent_bytes"] for row in rows}
    theirs, ours, in_float32 = (one.name for one in contenders.CONTENDERS[MUON.name]["ZeRO-2"])
    for engine, expected in SENT.items():
        for name, num_bytes in zip((theirs, in_float32), expected, strict=True):
            weights = 3 / 2 * 2  # half of all, in 16 bits
            # Flags, norms, and ZeRO-3's small matrices, which are gathered when they are stepped.
            assert 0 <= sent[engine, name] - (weights + num_bytes) * SIDE**2 < 100, (engine, name)
        # In bfloat16, if the processor is fast in it.
        assert sent[engine, ours] <= sent[engine, in_float32]


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
