# SPDX-License-Identifier: Apache-2.0
"""Errors of updates over bytes of states, in a figure."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.fidelity.schemes import CONTROL
from benchmarks.record import write_png
from zero8.spec.codec import CODECS

PANELS = "rivals, beta2 0.999", "rivals, beta2 0.95"


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
