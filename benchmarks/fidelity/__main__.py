# SPDX-License-Identifier: Apache-2.0
"""Measure what states and weights of few bits cost: errors of updates, and final losses.

Writes OUT (JSON) and a table (.md) beside it, and with the settings of rivals a figure (.png).  A
setting is an algorithm on a task.  In each, the gradients of one fp32 run go to all schemes, and
some schemes are trained to the end.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import record
from benchmarks.fidelity.runs import STALL_STEPS, final_loss, loss_statistics, replay
from benchmarks.fidelity.schemes import CONTROL, usable
from benchmarks.fidelity.table import QUICK, SETTINGS
from benchmarks.fidelity.training import Setting
from benchmarks.pool import run_all
from benchmarks.record import write_png
from zero8.spec.codec import CODECS

MODULE = "benchmarks.fidelity"
WORDS = (
    "Errors are of the update u against that of the same algorithm with float32 states on the same "
    "gradients: RMS(u_q - u) over RMS(u) in the second half of a run, and the same of the sums of "
    "updates (drift). Adam's u is mhat/(sqrt(vhat) + eps). Lion's is a sign, so that its RMS error "
    "is twice the root of the share of wrong signs. `gradients that end` compares elements without "
    "a gradient; `kept weights` compares what weights lose in a step, with its learning rate. "
    "sqrt(v) over fp32's is a geometric mean at the end, and its error the RMS of relative errors. "
    "Stalled are elements whose code of v has not changed once in the last "
    f"{STALL_STEPS} steps, of those whose exact v has moved by more than "
    "1 % from the first to the last of these steps. "
    "Losses are means over seeds; differences are those of runs of one seed, with the standard "
    "error of their mean."
)
COLUMNS = {
    "bytes/param": "bytes_per_param",
    "RMS error": "rms_update_error",
    "drift": "drift",
    "largest \\|u\\|": "largest_update",
    "moved at g = 0": "zero_grad_moved",
    "sqrt(v) over fp32's": "sqrt_v_bias",
    "error of sqrt(v)": "sqrt_v_error",
    "stalled": "stalled",
    "loss": "val_loss_mean",
    "minus fp32's": "difference_mean",
    "error of that": "difference_standard_error",
}
PANELS = "rivals, beta2 0.999", "rivals, beta2 0.95"


def measure(settings: Sequence[Setting]) -> dict:
    """Run all replays and trainings; return the rows, and what was skipped."""
    settings, missing = zip(*map(usable, settings), strict=True)
    replays = [partial(replay, setting) for setting in settings]
    cases = [(s, scheme, seed) for s in settings for scheme in s.trained for seed in s.seeds]
    results = run_all([*replays, *(partial(final_loss, *case) for case in cases)], record.cores())
    replayed, trained = results[: len(replays)], results[len(replays) :]
    rows = {(row["setting"], row["scheme"]): row for found in replayed for row in found}
    losses: dict[tuple[str, str], list[float]] = {}
    for (setting, scheme, _), loss in zip(cases, trained, strict=True):
        losses.setdefault((setting.name, scheme), []).append(loss)
    for setting in settings:
        for scheme in setting.trained:
            key, fp32 = (setting.name, scheme), losses[setting.name, setting.trained[0]]
            row = rows.setdefault(key, {"setting": setting.name, "scheme": scheme})
            row |= loss_statistics(losses[key], fp32)
    return {"rows": list(rows.values()), "skipped": [one for of_all in missing for one in of_all]}


def markdown(result: dict) -> list[str]:
    """Return the lines of the table of a result."""
    names = {name: (name, record.TEXT) for name in ("setting", "scheme")}
    numbers = {header: (key, record.NUMBER) for header, key in COLUMNS.items()}
    skipped = [f"- skipped {e['setting']}, {e['scheme']}: {e['reason']}" for e in result["skipped"]]
    rows = record.table_of(result["rows"], names | numbers)
    return [WORDS, "", *rows, *([""] if skipped else []), *skipped]


def draw(rows: list[dict], path: Path) -> None:
    """Draw the errors of all schemes of the settings in PANELS; nothing if there are none."""
    panels = {name: [row for row in rows if row["setting"] == name] for name in PANELS}
    if not all(panels.values()):
        return
    figure = Figure(figsize=(12, 6), layout="constrained")
    for axes, (name, found) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        points = [
            (row["bytes_per_param"], row["rms_update_error"], row["scheme"])
            for row in found
            if row["scheme"] != CONTROL
        ]
        _draw_points(axes, sorted(points, key=lambda point: point[1]))
        axes.set_title(name.removeprefix("rivals, "))
    figure.suptitle("Error of the update over bytes of states; dashed: no scheme is better in both")
    write_png(figure, path)


def _draw_points(axes: Axes, points: list[tuple[float, float, str]]) -> None:
    """Draw points in ascending order of their errors, with their names in a column beside them."""
    errors = [error for _, error, _ in points]
    heights = np.geomspace(errors[0] * 0.9, errors[-1] * 1.1, len(points))
    best, least = [], np.inf
    for (size, error, name), height in zip(points, heights, strict=True):
        color = "tab:blue" if name in CODECS else "tab:orange"
        text = f"{name} of zero8" if name in CODECS else name
        axes.plot(size, error, "o", color=color, zorder=3)
        axes.plot([size, 5.2], [error, height], color=color, linewidth=0.5, alpha=0.6)
        axes.text(5.4, height, text, color=color, fontsize=8, verticalalignment="center")
        if size < least:
            best.append((size, error))
            least = size
    axes.plot(*zip(*best, strict=True), color="gray", linestyle="--", linewidth=1)
    axes.set(xscale="log", yscale="log", xlim=(0.5, 16), xlabel="bytes per parameter")
    axes.set_ylabel("RMS error of the update, in units of RMS(u)")
    axes.set_xticks([0.5, 1, 1.5, 2, 4], ["0.5", "1", "1.5", "2", "4"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def main() -> None:
    """Measure and write both files."""
    parser = record.parser(MODULE, __doc__)
    parser.add_argument("--quick", action="store_true", help="Adam on text only, fewer schemes")
    parser.add_argument("--only", default="", metavar="WORDS", help="settings with these words")
    arguments = parser.parse_args()
    settings = [s for s in (QUICK if arguments.quick else SETTINGS) if arguments.only in s.name]
    if not settings:
        parser.error(f"got --only {arguments.only}, expected words of {[s.name for s in SETTINGS]}")
    environment = record.environment(MODULE)
    result = {**environment, **measure(settings)}
    record.write(result, arguments.json, markdown, "Fidelity of states and weights of few bits")
    draw(result["rows"], arguments.json.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
