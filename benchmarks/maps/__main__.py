# SPDX-License-Identifier: Apache-2.0
"""Compare the maps of the 8-bit optimizers paper with `log`, on gradients of a small GPT.

Writes OUT (JSON), tables beside it (.md) and figures (OUT's name with _maps, _pairs, ...; .png).

A row per map and grain has errors of the update: in `once` when exact moments are quantized once,
in `carried` with states kept in 8 bits for the whole run.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure

from benchmarks import record
from benchmarks.fidelity.tasks import TextTask
from benchmarks.fidelity.training import Setting
from benchmarks.maps.codes import CARRIED, GRAINS, NAMES, carry
from benchmarks.maps.once import NUM_CODES, PairTally, once
from benchmarks.pool import run_all
from benchmarks.record import write_png

MODULE = "benchmarks.maps"
WORDS = (
    "Errors are of Adam's update u = mhat/(sqrt(vhat) + eps), on gradients of the demonstration's "
    "GPT. RMS errors are in units of RMS(u). Blocks have 256 elements; `tensor`: a scale for each."
)
RUN = Setting("maps", TextTask(), 200, replayed=tuple(CARRIED))
COLORS = {
    "linear": "tab:red",
    "quantile": "tab:green",
    "dynamic": "tab:orange",
    "log": "tab:blue",
    "dynamic of zero8": "tab:brown",
}
STYLES = {
    "block": {"marker": "o", "linestyle": "none", "markersize": 8},
    "tensor": {"marker": "s", "linestyle": "none", "markersize": 8, "fillstyle": "none"},
}
QUANTITIES = {
    "share of the elements": (-8, -2),
    "mean |error of u|": (-5, 1),
    "mean |error of u| / |u|": (-4, 2),
}
"""What `PairTally` has, and the exponents of ten at the ends of its colors."""


def measure(setting: Setting) -> tuple[dict, dict[tuple[str, str], PairTally]]:
    """Return the result, and the tallies of pairs of codes."""
    jobs = [partial(carry, setting), partial(once, setting)]
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


def draw(result: dict, tallies: dict[tuple[str, str], PairTally], out: Path) -> None:
    """Write all figures beside `out`."""

    def path(name: str) -> Path:
        return out.with_name(f"{out.stem}_{name}.png")

    draw_first_moment(tallies, path("first_moment"))
    draw_update_error(result, path("update_error"))
    for grain in GRAINS:
        draw_pairs(tallies, grain, path(f"pairs_{grain}"))


def draw_first_moment(tallies: dict[tuple[str, str], PairTally], path: Path) -> None:
    """Draw usage and errors by the code of m, with one scale per block."""
    figure = Figure(figsize=(10, 9), layout="constrained")
    panels = figure.subplots(3, sharex=True)
    for name in NAMES:
        rows = tallies[name, "block"].by_first_moment()
        for axes, row in zip(panels, rows, strict=True):
            axes.plot(row.numpy(), color=COLORS[name], label=name, linewidth=1)
    for axes, label in zip(panels, QUANTITIES, strict=True):
        axes.set(yscale="log", ylabel=label)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("code of m, by value: 127 or 128 is 0")
    panels[0].legend(ncols=4)
    figure.suptitle("Error of the update by the code of m, one scale per block")
    write_png(figure, path)


def draw_update_error(result: dict, path: Path) -> None:
    """Draw the error of the update with one scale per block and per tensor."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    titles = {"once": "after one quantization", "carried": "state in 8 bits for the whole run"}
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        _draw_grains(axes, result[key])
        axes.set_title(title)
        axes.grid(alpha=0.3)
    axes.legend(title="one scale per")
    write_png(figure, path)


def _draw_grains(axes: Axes, rows: list[dict]) -> None:
    names = list(dict.fromkeys(row["map"] for row in rows))[::-1]
    for grain, style in STYLES.items():
        axes.plot([], [], color="gray", label=grain, **style)
        for row in (row for row in rows if row["grain"] == grain):
            place, color = names.index(row["map"]), COLORS[row["map"]]
            axes.plot(row["rms_update_error"], place, color=color, **style)
    axes.set_yticks(range(len(names)), names)
    axes.set(ylim=(-0.6, len(names) - 0.4), xscale="log")
    axes.set_xlabel("RMS error of the update u, in units of RMS(u)")


def draw_pairs(tallies: dict[tuple[str, str], PairTally], grain: str, path: Path) -> None:
    """Draw how often each pair of codes is used, and its errors, as heat maps."""
    figure = Figure(figsize=(3 * len(NAMES) + 1, 9.4), layout="constrained")
    grid = figure.subplots(len(QUANTITIES), len(NAMES), sharex=True, sharey=True)
    for number, (label, (first, last)) in enumerate(QUANTITIES.items()):
        # Few colors, two to a decade, keep the file small.
        edges = 10.0 ** np.linspace(first, last, 2 * (last - first) + 1)
        norm = BoundaryNorm(edges, colormaps["viridis"].N, extend="both")
        for axes, name in zip(grid[number], NAMES, strict=True):
            values = tallies[name, grain].by_pair()[number].numpy().T  # columns are codes of m
            shown = np.ma.masked_invalid(values)
            image = axes.imshow(shown, norm=norm, origin="lower", interpolation="nearest")
            axes.set(xticks=range(0, NUM_CODES + 1, 64), yticks=range(0, NUM_CODES + 1, 64))
        figure.colorbar(image, ax=grid[number], label=label, ticks=edges[::2], format="{x:.0e}")
        grid[number][0].set_ylabel("code of v, by value")
    for name, top, bottom in zip(NAMES, grid[0], grid[-1], strict=True):
        top.set_title(name)
        bottom.set_xlabel("code of m, by value")
    figure.suptitle(
        f"Pairs of codes after one quantization, one scale per {grain}; white: not used"
    )
    write_png(figure, path)


def main() -> None:
    """Measure and write all files."""
    out = record.parser(MODULE, __doc__).parse_args().json
    environment = record.environment(MODULE)
    result, tallies = measure(RUN)
    record.write({**environment, **result}, out, markdown, "Maps of 8-bit states")
    draw(result, tallies, out)


if __name__ == "__main__":
    sys.exit(main())
