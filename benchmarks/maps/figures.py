# SPDX-License-Identifier: Apache-2.0
"""The figures of the result."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.fidelity.losses import FP32
from benchmarks.maps.carried import ZERO8_DYNAMIC
from benchmarks.maps.codes import GRAINS
from benchmarks.maps.heatmaps import draw_pairs
from benchmarks.maps.pairs import PairTally
from benchmarks.maps.png import write_png
from benchmarks.maps.shown import WIDE

COLORS = {
    "linear": "tab:red",
    "quantile": "tab:green",
    "dynamic": "tab:orange",
    "log": "tab:blue",
    WIDE: "tab:cyan",
    ZERO8_DYNAMIC: "tab:brown",
    FP32: "black",
}
MOMENTS = {"m": "first moment", "v": "second moment"}
STYLES = {
    "block": {"marker": "o", "linestyle": "none", "markersize": 8},
    "tensor": {"marker": "s", "linestyle": "none", "markersize": 8, "fillstyle": "none"},
}


def draw(result: dict, tallies: dict[tuple[str, str], PairTally], out: Path) -> list[Path]:
    """Write all figures beside `out`; return their paths."""
    drawn = {
        "maps": draw_maps,
        "first_moment": draw_first_moment,
        "update_error": draw_update_error,
        "sensitivity": draw_sensitivity,
    }
    paths = []
    for name, function in drawn.items():
        path = out.with_name(f"{out.stem}_{name}.png")
        function(result, path)
        paths.append(path)
    for grain in GRAINS:
        path = out.with_name(f"{out.stem}_pairs_{grain}.png")
        draw_pairs(tallies, grain, path)
        paths.append(path)
    return paths


def draw_maps(result: dict, path: Path) -> None:
    """Draw the values of every map: above as they are, below their magnitudes, logarithmic."""
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    for column, (moment, title) in zip(figure.subplots(2, 2).T, MOMENTS.items(), strict=True):
        plain, logarithmic = column
        for name, values in result["maps"][moment].items():
            places = np.arange(256)[-len(values) :]
            style = {"color": COLORS[name], "markersize": 3, "label": name}
            plain.plot(places, values, ".", **style)
            logarithmic.plot(places, np.abs(values), ".", **style)
        plain.set_title(f"{title}, {moment}")
        plain.set_ylabel("value / scale")
        plain.legend(markerscale=4)
        logarithmic.set_ylabel("|value| / scale")
        logarithmic.set_yscale("log")
        logarithmic.set_xlabel("code, by value")
        for axes in column:
            axes.grid(alpha=0.3)
    write_png(figure, path)


def draw_first_moment(result: dict, path: Path) -> None:
    """Draw usage and errors by the code of m, with one scale per block."""
    quantities = {
        "share": "share of the elements",
        "absolute_error": "mean |error of u|",
        "relative_error": "mean |error of u| / |u|",
    }
    figure = Figure(figsize=(10, 9), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(3, sharex=True), quantities.items(), strict=True):
        for row in result["first_moment"]:
            if row["grain"] == "block":
                values = [np.nan if value is None else value for value in row[key]]
                axes.plot(values, color=COLORS[row["map"]], label=row["map"], linewidth=1)
        axes.set_yscale("log")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    axes.set_xlabel("code of m, by value: 127 or 128 is 0")
    figure.axes[0].legend(ncols=4)
    figure.suptitle("Error of the update by the code of m, one scale per block")
    write_png(figure, path)


def draw_update_error(result: dict, path: Path) -> None:
    """Draw the error of the update with one scale per block and per tensor."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    once, carried = figure.subplots(1, 2)
    _draw_grains(once, result["once"])
    once.set_title("after one quantization")
    _draw_grains(carried, result["carried"])
    carried.set_title("state in 8 bits for the whole run")
    carried.legend(title="one scale per")
    write_png(figure, path)


def _draw_grains(axes: Axes, rows: list[dict]) -> None:
    names = list(dict.fromkeys(row["map"] for row in rows))[::-1]
    for grain, style in STYLES.items():
        axes.plot([], [], color="gray", label=grain, **style)
        for row in rows:
            if row["grain"] == grain:
                place, color = names.index(row["map"]), COLORS[row["map"]]
                axes.plot(row["rms_update_error"], place, color=color, **style)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xscale("log")
    axes.set_xlabel("RMS error of the update u, in units of RMS(u)")
    axes.grid(alpha=0.3)


def draw_sensitivity(result: dict, path: Path) -> None:
    """Draw final losses, and below their differences to fp32's, against each hyperparameter.

    The other hyperparameters have their defaults; all runs have the first seed.
    """
    default, *rows = result["sensitivity"]
    names = list(dict.fromkeys(row["hyperparameter"] for row in rows))
    figure = Figure(figsize=(2.6 * len(names), 5.4), layout="constrained")
    grid = figure.subplots(2, len(names), sharex="col", sharey="row")
    for (above, below), name in zip(grid.T, names, strict=True):
        points = [(row["value"], row) for row in rows if row["hyperparameter"] == name]
        points = sorted([*points, (result["defaults"][name], default)], key=lambda point: point[0])
        losses = [{s: x[0] for s, x in row["val_losses"].items()} for _, row in points]
        for scheme in default["val_losses"]:
            style = {"color": COLORS[scheme], "label": scheme}
            above.plot([loss[scheme] for loss in losses], ".-", **style)
            below.plot([loss[scheme] - loss[FP32] for loss in losses], ".-", **style)
        below.set_xticks(range(len(points)), [f"{value:g}" for value, _ in points])
        below.set_xlabel(name)
        for axes in (above, below):
            axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("validation loss, nats per byte")
    grid[1][0].set_ylabel("minus that of fp32")
    grid[0][0].legend()
    write_png(figure, path)
