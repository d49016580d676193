# SPDX-License-Identifier: Apache-2.0
"""Compare the maps of the 8-bit optimizers paper with `log`, on gradients of a small GPT.

Writes OUT (JSON), tables beside it (.md) and figures (OUT's name with _maps, _pairs, ...; .png).

A row per map and grain has errors of the update: in `once` when exact moments are quantized once,
in `carried` with states kept in 8 bits for the whole run.
"""

import sys
from functools import partial

from benchmarks import record
from benchmarks.fidelity.coded import CodedAdam
from benchmarks.fidelity.runs import replay
from benchmarks.fidelity.schemes import SCHEMES, Scheme
from benchmarks.fidelity.tasks import TextTask
from benchmarks.fidelity.training import Setting
from benchmarks.maps.codes import GRAINS, LOG, NAMES, code_of
from benchmarks.maps.figures import draw
from benchmarks.maps.once import PairTally, once
from benchmarks.pool import run_all

MODULE = "benchmarks.maps"
CARRIED = {
    (name, grain): Scheme(partial(CodedAdam, code_of(name, grain)))
    for grain in GRAINS
    for name in NAMES
} | {(LOG, "block"): SCHEMES[LOG], ("dynamic of zero8", "block"): SCHEMES["dynamic"]}
WORDS = (
    "Errors are of Adam's update u = mhat/(sqrt(vhat) + eps), on gradients of the demonstration's "
    "GPT. RMS errors are in units of RMS(u). Blocks have 256 elements; `tensor`: a scale for each."
)
RUN = Setting("maps", TextTask(), 200, replayed=tuple(CARRIED))


def measure(setting: Setting) -> tuple[dict, dict[tuple[str, str], PairTally]]:
    """Return the result, and the tallies of pairs of codes."""
    jobs = [partial(replay, setting, CARRIED), partial(once, setting)]
    carried, tallies = run_all(jobs, workers=record.cores())
    result = {
        "once": [{"map": n, "grain": grain, **t.row()} for (n, grain), t in tallies.items()],
        "carried": [dict(zip(("map", "grain"), r["scheme"], strict=True)) | r for r in carried],
    }
    return result, tallies


def markdown(result: dict) -> list[str]:
    """Return the lines of the tables of a result."""
    errors = ("mean_absolute_error", "mean_relative_error", "rms_update_error")
    kept = ("bytes_per_param", "rms_update_error", "drift", "largest_update", "sqrt_v_bias")
    once = ["", "## One quantization", "", "Exact moments of an fp32 run, encoded and decoded.", ""]
    once += _table(result["once"], (*errors, "large_relative_share", "pairs_used"))
    carried = ["", "## States kept in 8 bits", "", "Errors of the second half of the run.", ""]
    return [WORDS, *once, *carried, *_table(result["carried"], kept)]


def _table(rows: list[dict], keys: tuple[str, ...]) -> list[str]:
    names = {"map": ("map", record.TEXT), "scale per": ("grain", record.TEXT)}
    numbers = {key.replace("_", " "): (key, record.NUMBER) for key in keys}
    return record.table_of(rows, names | numbers)


def main() -> None:
    """Measure and write all files."""
    out = record.parser(MODULE, __doc__).parse_args().json
    environment = record.environment(MODULE)
    result, tallies = measure(RUN)
    record.write({**environment, **result}, out, markdown, "Maps of 8-bit states")
    draw(result, tallies, out)


if __name__ == "__main__":
    sys.exit(main())
