# SPDX-License-Identifier: Apache-2.0
"""The result of steps on a GPU as a figure."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero8.bench.step.variants import CUDA_VARIANTS

PANELS_A_ROW = 3


def plot(result: dict, path: Path) -> None:
    """Draw, per kind of parameter, the time of every step over the size, and that of copies."""
    count = -(-len(CUDA_VARIANTS) // PANELS_A_ROW)
    figure = Figure(figsize=(5 * PANELS_A_ROW, 4 * count), layout="constrained")
    panels = figure.subplots(count, PANELS_A_ROW, sharex=True, sharey=True).flatten()
    for axes, variant in zip(panels, CUDA_VARIANTS, strict=False):
        rows = [row for row in result["rows"] if row["variant"] == variant.name]
        _draw(axes, rows, result["rows"])
        axes.set_title(variant.title, loc="left", fontsize=9)
        axes.set_xlabel("parameters")
        axes.set_ylabel("ns per parameter")
    for axes in panels[len(CUDA_VARIANTS) :]:
        axes.set_axis_off()
    figure.suptitle(f"Optimizer step on {result['machine']['gpu']}; dashed: copies")
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, rows: list[dict], everything: list[dict]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.2)
    for key in dict.fromkeys((row["name"], row["codec"]) for row in rows):
        label = " ".join(filter(None, key))
        _line(axes, [r for r in rows if (r["name"], r["codec"]) == key], label=label, marker="o")
    for count in sorted({row["bytes_per_param"] for row in rows}):
        copies = [r for r in everything if (r["name"], r["bytes_per_param"]) == ("copy", count)]
        _line(axes, copies, color="gray", linestyle="--", linewidth=1)
    if rows:
        axes.legend(fontsize=7)


def _line(axes: Axes, rows: list[dict], **style: object) -> None:
    points = sorted((row["numel"], row["ns_per_param"]) for row in rows)
    axes.plot(*zip(*points, strict=True), markersize=3, **style)
