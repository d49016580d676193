# SPDX-License-Identifier: Apache-2.0
"""The figures of the result."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.maps.png import write_png
from zero8.plan.report import GIB

ROUNDING_COLORS = {"nearest": "tab:red", "independent": "tab:orange", "dither": "tab:blue"}
FORMAT_COLORS = {"INT8": "tab:blue", "INT4": "tab:orange"}
PARTS = {"weight": "tab:blue", "gradient": "tab:orange", "state": "tab:green"}
ERRORS = {"rms_error": "o", "rms_error_of_sums": "s"}


def draw(result: dict, out: Path) -> list[Path]:
    """Write all figures beside `out`; return their paths."""
    drawn = {"updates": draw_updates, "memory": draw_memory, "gradients": draw_gradients}
    paths = []
    for name, function in drawn.items():
        path = out.with_name(f"{out.stem}_{name}.png")
        function(result, path)
        paths.append(path)
    return paths


def draw_updates(result: dict, path: Path) -> None:
    """Draw the path of a weight by rounding, for both formats."""
    paths = result["paths"]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (name, by_rounding) in zip(panels, paths["formats"].items(), strict=True):
        axes.plot(paths["right"], color="black", linestyle="--", label="float32")
        for rounding, weights in by_rounding.items():
            color = ROUNDING_COLORS[rounding]
            axes.plot(weights, color=color, label=rounding, linewidth=1, drawstyle="steps-post")
        axes.set_title(f"weight in {name}")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("weight")
    panels[0].legend(loc="upper left")
    figure.suptitle(f"A weight of 1 that gets an update of {paths['update']:.3f} in every step")
    write_png(figure, path)


def draw_memory(result: dict, path: Path) -> None:
    """Draw stacked bars of weights, gradients and states."""
    memory = result["memory"]
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    rows = memory["rows"][::-1]
    names = [f"{row['weights']} weights, {row['states']} states" for row in rows]
    ends = [0.0] * len(rows)
    for part, color in PARTS.items():
        sizes = [row[f"{part}_bytes"] / GIB for row in rows]
        axes.barh(names, sizes, left=ends, color=color, label=f"{part}s")
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    for place, end in enumerate(ends):
        axes.text(end + 0.5, place, f"{end:.1f}", va="center")
    axes.set_xlim(0, 1.08 * max(ends))
    axes.set_xlabel("GiB, without activations")
    axes.set_title(f"Training {memory['parameters'] / 1e9:g}B parameters, by weights and states")
    axes.legend(loc="lower right")
    write_png(figure, path)


def draw_gradients(result: dict, path: Path) -> None:
    """Draw the errors of averages, and the differences of final losses."""
    names = list(dict.fromkeys(row["rounding"] for row in result["averages"]))[::-1]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    errors, losses = figure.subplots(1, 2, sharey=True)
    _draw_errors(errors, result["averages"], names)
    _draw_losses(losses, result["losses"], names)
    errors.set_yticks(range(len(names)), names)
    errors.set_ylim(-0.6, len(names) - 0.4)
    figure.legend(loc="outside lower center", ncols=len(FORMAT_COLORS) + len(ERRORS))
    figure.suptitle("Gradients of 4 ranks, rounded and averaged")
    write_png(figure, path)


def _draw_errors(axes: Axes, rows: list[dict], names: list[str]) -> None:
    for row in rows:
        for key, marker in ERRORS.items():
            axes.plot(row[key], names.index(row["rounding"]), marker, **_style(row["format"], key))
    for key, marker in ERRORS.items():
        label = "of one step" if key == "rms_error" else "of the sum over steps"
        axes.plot([], [], marker, label=label, **_style(None, key))
    axes.set_xscale("log")
    axes.set_xlabel("RMS error of the average, relative")
    axes.grid(alpha=0.3)


def _style(number_format: str | None, key: str) -> dict:
    fill = "full" if key == "rms_error" else "none"
    return {"color": FORMAT_COLORS.get(number_format, "gray"), "fillstyle": fill}


def _draw_losses(axes: Axes, rows: list[dict], names: list[str]) -> None:
    exact = rows[0]["val_losses"]
    for name, color in FORMAT_COLORS.items():
        axes.plot([], [], "o", color=color, label=name)
        for row in rows:
            if row["format"] == name:
                pairs = zip(row["val_losses"], exact, strict=True)
                differences = [loss - reference for loss, reference in pairs]
                places = [names.index(row["rounding"]) + 0.12 * (name == "INT8")] * len(differences)
                axes.plot(differences, places, ".", color=color)
                axes.plot(row["difference_mean"], places[0], "o", color=color)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("validation loss minus that of exact averages\n(points: seeds; disks: means)")
    axes.grid(alpha=0.3)
