# SPDX-License-Identifier: Apache-2.0
"""The measurement of whole engines: every contender is timed, in a table of medians and ratios."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import distributed

from examples.gpt.engine_fsdp2 import join_ranks
from zero8 import cli
from zero8.algorithms.adam import ADAM
from zero8.algorithms.muon import MUON
from zero8.bench.engine import command, contenders, engines, figure, report, traffic
from zero8.bench.engine.sent import sent_by
from zero8.bench.engine.traffic import WEIGHT_BYTES
from zero8.plan.matrices import sent_by_deepspeed, sent_by_zero8
from zero8.plan.model import Model
from zero8.plan.setup import Setup

ENGINES = ("ZeRO-2", "ZeRO-3", "FSDP2")
CONTENDERS = contenders.CONTENDERS[ADAM.name]
NAMES = [(name, one.name) for name in ENGINES for one in CONTENDERS[name]]
SIDE = 64


def bench(out, *words):
    sizes = ["--numel", 2 * SIDE**2, "--rounds", 2, "--threads", 1]
    return cli.main(["bench", "engine", "--json", *map(str, (out, *sizes, *words))])


def measured(out, *words):
    """Measure small engines in this process; return the status."""
    engines.SIDES.update(dict.fromkeys(engines.SIDES, SIDE))
    return bench(out, "--clipping", "1.0", *words)


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


@pytest.mark.slow
def test_bytes_that_muon_and_deepspeeds_send_are_those_of_the_plan(standing_ranks, tmp_path):
    out = tmp_path / "muon.json"
    assert standing_ranks(2).run(measured_muon, timeout_s=400, out=str(out)) == [0, 0]
    found = json.loads(out.read_text())
    sent = {(row["engine"], row["name"]): row["sent_bytes"] for row in found["rows"]}
    theirs, ours, in_float32 = (one.name for one in contenders.CONTENDERS[MUON.name]["ZeRO-2"])
    assert list(sent) == [(e, name) for e in ENGINES[:2] for name in (theirs, ours, in_float32)]
    # Flags, norms, and ZeRO-3's small matrices, which are gathered as soon as they are stepped.
    model = Model("", tuple((str(number), (SIDE, SIDE)) for number in range(3)))
    for stage, engine in ((2, "ZeRO-2"), (3, "ZeRO-3")):
        setup = Setup(stage=stage, world_size=2, algorithm_name=MUON.name)
        weights = model.numel * WEIGHT_BYTES // 2
        planned = sent_by_deepspeed(model, setup), 2 * sent_by_zero8(model, setup)
        for name, num_bytes in zip((theirs, in_float32), planned, strict=True):
            flags = model.numel * sent[engine, name] - weights - num_bytes
            assert 0 <= flags < 100, (engine, name)
        # In bfloat16, if the processor is fast in it.
        assert sent[engine, ours] <= sent[engine, in_float32]
    assert "zero8's Muon, float32" in out.with_suffix(".md").read_text()


@pytest.fixture(scope="module")
def result(standing_ranks, tmp_path_factory):
    out = tmp_path_factory.mktemp("engine") / "engine.json"
    assert standing_ranks(1).run(measured_adam, timeout_s=300, out=str(out)) == [0]
    return json.loads(out.read_text()), Path(out).with_suffix(".md").read_text()


@pytest.mark.slow
def test_bench_engine_times_every_contender_of_every_engine(result):
    rows = result[0]["rows"]
    assert [(row["engine"], row["name"]) for row in rows] == NAMES
    for row in rows:
        assert 0 < row["inner_ms"] < row["phase_ms"]
        assert row["phase_ms_p10"] <= row["phase_ms"] <= row["phase_ms_p90"]
        assert (row["ratio"] == 1.0) is (row["name"] == row["over"])
        own = contenders.DEEPSPEED_BF16 if "bf16" in row["name"] else contenders.DEEPSPEED
        assert row["over"] == (contenders.TORCH if row["engine"] == "FSDP2" else own)


@pytest.mark.slow
def test_bench_engine_table_has_a_line_per_row_and_target(result):
    found, table = result
    assert [check["met"] for check in found["checks"]] == [
        row["ratio"] >= report.LIMITS[row["name"]]
        for row in found["rows"]
        if row["name"] in report.LIMITS
    ]
    for row in found["rows"]:
        assert f"| {row['engine']}, clipped at 1, {row['name']} | {row['phase_ms']:.1f} |" in table
        assert f" | {row['inner_ms']:.1f} | {row['step_bytes']:.1f} | " in table
    for check in found["checks"]:
        assert f"| {check['target']} | {check['value']:.4g} |" in table
    assert found["command"] in table and "1 rank(s)" in table


STATES = 2 + 12 / 256  # codes, and three float32 scales per block
# By engine and optimizer, bytes per parameter of the step, of the rest, and of the rest clipped.
BYTES = {
    ("ZeRO-2", "DeepSpeed, fp32 masters"): (28, 10, 18),
    ("ZeRO-2", "zero8, fp32 masters"): (12 + 2 * STATES, 0, 0),
    ("ZeRO-2", "zero8, 24-bit masters"): (10 + 2 * STATES, 0, 0),
    ("ZeRO-2", "DeepSpeed, bf16 masters and states"): (14, 8, 12),
    ("ZeRO-2", "zero8, bf16 masters"): (8 + 2 * STATES, 0, 0),
    ("ZeRO-3", "DeepSpeed, fp32 masters"): (28, 14, 14),
    ("ZeRO-3", "zero8, fp32 masters"): (12 + 2 * STATES, 0, 0),
    ("ZeRO-3", "zero8, 24-bit masters"): (8 + 2 * STATES, 0, 0),
    ("ZeRO-3", "DeepSpeed, bf16 masters and states"): (14, 8, 8),
    ("ZeRO-3", "zero8, bf16 masters"): (6 + 2 * STATES, 0, 0),
    ("FSDP2", "torch's fused AdamW"): (28, 0, 12),
    ("FSDP2", "zero8"): (12 + 2 * STATES, 0, 4),
}


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_bench_engine_bytes_are_those_of_each_pass(clipping):
    for engine, one in ((name, one) for name in ENGINES for one in CONTENDERS[name]):
        step, rest, clipped = BYTES[engine, one.name]
        case = engines.Case(engine, clipping, 2**26)
        found = traffic.traffic(case, one.entry)
        assert found == (step, clipped if clipping else rest)


@pytest.mark.parametrize("names", [ENGINES, ENGINES[:1]])
def test_bench_engine_figure_has_a_bar_for_step_and_rest_of_every_row(names, tmp_path, monkeypatch):
    rows = [
        {
            "engine": name,
            "clipping": 1.0,
            "name": one.name,
            "over": one.over,
            "phase_ms": 400.0 if "bf16" in one.name else 90.0,
            "phase_ms_p10": 85.0,
            "phase_ms_p90": 500.0 if "bf16" in one.name else 100.0,
            "inner_ms": 60.0,
            "ratio": 1.5,
        }
        for name in names
        for one in CONTENDERS[name]
    ]
    result = {"rows": rows, "numel": 2**26, "world_size": 1, "threads": 2, "cpu": "", "isa": "avx2"}
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    figure.plot(result, tmp_path / "engine.png")
    panels = drawn[0].axes
    assert [axes.get_title("left") for axes in panels] == [f"{n}, clipped at 1" for n in names]
    for axes, name in zip(panels, names, strict=True):
        widths = [bar.get_width() for bar in axes.patches]
        assert widths[::2] == [60.0] * len(CONTENDERS[name])
        assert sum(widths) == sum(row["phase_ms"] for row in rows if row["engine"] == name)
        assert axes.get_xlim()[1] == 180.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engines", "ZeRO-4"], "--engines: got 'ZeRO-4'"),
        (["--clipping", "0.5"], "--clipping: got '0.5'"),
        (["--rounds", "1"], "--rounds: got 1"),
        (["--threads", "0"], "--threads: got 0"),
        (["--numel", "4097"], "--numel: got 4097"),
        (["--algorithm", "muon", "--engines", "FSDP2"], "--engines: got 'FSDP2'"),
    ],
)
def test_bench_engine_bad_argument_is_a_usage_error(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench(tmp_path / "out.json", "--numel", str(2048**2), *words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_bench_engine_command_of_several_ranks_starts_with_their_launcher(monkeypatch):
    monkeypatch.setattr(command.numbers, "num_ranks", lambda: 2)
    arguments = Namespace(json=Path("out.json"), algorithm="adam", numel=4096, rounds=2, threads=1)
    words = command._command(arguments, ("ZeRO-2",), ("1.0",)).split()
    assert words[:6] == ["torchrun", "--nproc-per-node", "2", "-m", "zero8.cli", "bench"]
