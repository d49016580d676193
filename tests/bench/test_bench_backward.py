# SPDX-License-Identifier: Apache-2.0
"""The measurement of steps in the backward: its loops are the same training, its counts right."""

import json
from concurrent.futures import Future

import pytest
import torch

from zero8 import cli
from zero8.bench.backward import measure
from zero8.step import in_backward

HIDDEN, LAYERS = 64, 4
LAYER_BYTES = 4 * (HIDDEN * HIDDEN + HIDDEN)
WEIGHT_BYTES = 4 * HIDDEN * HIDDEN
SPREADS = {f"{what}_ms{part}" for what in ("step", "iteration") for part in ("", "_p10", "_p90")}
ROW_KEYS = {
    "name",
    "peak_gradient_bytes",
    "peak_gradient_bytes_median",
    "cpu_ms",
    "page_faults",
    "waited_share",
} | SPREADS
RESULT_KEYS = {
    "hidden",
    "layers",
    "batch",
    "params",
    "threads",
    "steps",
    "rows",
    "remark",
    "checks",
    "versions",
    "commit",
    "cpu",
    "machine",
    "command",
    "seconds",
}


class AtOnce:
    """An executor whose thread is never late: it has finished when `submit` returns."""

    def __init__(self, *_):
        pass

    def submit(self, call, *arguments):
        call(*arguments)
        done = Future()
        done.set_result(None)
        return done


def bench(out, *words):
    sizes = ["--steps", 3, "--threads", 2, "--hidden", HIDDEN, "--layers", LAYERS]
    return cli.main(["bench", "backward", "--json", *map(str, (out, *sizes, *words))])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The path of one small run through the command line."""
    out = tmp_path_factory.mktemp("bench") / "new" / "backward.json"
    assert bench(out) == 0
    return out


def test_run_writes_the_promised_keys(tiny):
    result = json.loads(tiny.read_text())
    assert result.keys() == RESULT_KEYS
    assert result["params"] * 4 == LAYERS * LAYER_BYTES
    for row in result["rows"]:
        assert row.keys() == ROW_KEYS
        assert 0 < row["step_ms"] < row["iteration_ms"]
        assert row["iteration_ms_p10"] <= row["iteration_ms"] <= row["iteration_ms_p90"]
    assert result["machine"]["load_average"] >= 0
    assert "--threads 2" in result["command"]


def test_run_has_a_row_for_every_loop_and_no_figure(tiny):
    rows = {row["name"]: row for row in json.loads(tiny.read_text())["rows"]}
    assert list(rows) == [measure.PLAIN, measure.IN_BACKWARD, measure.TORCH]
    for name in (measure.PLAIN, measure.TORCH):
        assert rows[name]["peak_gradient_bytes"] == LAYERS * LAYER_BYTES
    assert {path.suffix for path in tiny.parent.iterdir()} == {".json", ".md"}


def test_run_tabulates_every_row_with_machine_and_command(tiny):
    result, table = json.loads(tiny.read_text()), tiny.with_suffix(".md").read_text()
    assert all(f"| {row['name']} |" in table for row in result["rows"])
    for said in (result["command"], result["cpu"], result["remark"], "load average before it"):
        assert said in table


def test_run_in_the_backward_has_fewer_gradients_alive(monkeypatch):
    """Where the thread keeps up: a weight's beside that of its bias, or the next one's."""
    monkeypatch.setattr(in_backward, "ThreadPoolExecutor", AtOnce)
    rows = {row["name"]: row for row in measure.measure(HIDDEN, LAYERS, 2)}
    peaks = {name: row["peak_gradient_bytes"] for name, row in rows.items()}
    assert peaks[measure.PLAIN] == LAYERS * LAYER_BYTES
    assert WEIGHT_BYTES <= peaks[measure.IN_BACKWARD] <= 2 * LAYER_BYTES


def test_run_unequal_weights_are_refused_and_nothing_is_written(tmp_path, monkeypatch):
    def loops(hidden, layers):
        found = real(hidden, layers)
        with torch.no_grad():
            found[measure.IN_BACKWARD].model[1].bias[0] += 1e-3
        return found

    real = measure.loops
    monkeypatch.setattr(measure, "loops", loops)
    with pytest.raises(RuntimeError, match="steps in the backward end with other weights"):
        bench(tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "least"), [("--steps", 2), ("--threads", 1), ("--hidden", 1), ("--layers", 1)]
)
def test_command_bad_argument_is_a_usage_error(tmp_path, capsys, option, least):
    with pytest.raises(SystemExit) as caught:
        bench(tmp_path / "x.json", option, 0)
    assert caught.value.code == 2
    assert f"{option}: got 0, expected at least {least}" in capsys.readouterr().err
