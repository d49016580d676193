# SPDX-License-Identifier: Apache-2.0
"""Draws the picture of README, for light and dark pages: `python docs/pictures.py`."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

FOLDER = Path(__file__).resolve().parent / "pictures"
INKS = {"light": ("#1f2328", "#ffffff"), "dark": ("#e6edf3", "#0d1117")}
"""Colors of text and page."""
CODES, SCALES, OTHERS = "#4493f8", "#f0883e", "#8b949e"


def draw(theme: str) -> None:
    """Write block_THEME.png: a block, and where its parts are under ZeRO on two ranks."""
    ink, page = INKS[theme]
    figure = Figure(figsize=(8, 4.6), facecolor=page)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 80), ylim=(0, 46))
    axes.set_axis_off()

    def text(x: float, y: float, words: str, size: float = 12, **more: Any) -> None:
        axes.text(x, y, words, color=ink, fontsize=size, va="center", **more)

    text(2, 43, "One block of the first moment: 256 numbers of a row", 13, weight="bold")
    for number in range(16):
        _box(axes, 2 + 2 * number, 36.5, 1.7, 3.2, OTHERS)
    text(2, 34.4, "float32: 1,024 bytes", 11)
    axes.annotate("", (42, 38), (36, 38), arrowprops={"arrowstyle": "-|>", "color": ink, "lw": 2})
    for number in range(16):
        _box(axes, 44 + 1.2 * number, 36.5, 0.9, 3.2, CODES)
    text(44, 34.4, "256 codes: 256 bytes", 11)
    _box(axes, 70, 36.5, 4, 3.2, SCALES)
    text(66.5, 34.4, "scale: 4 bytes", 11)

    text(2, 29, "Under ZeRO with offload each rank keeps its own shard", 13, weight="bold")
    for rank in range(2):
        left = 2 + 39 * rank
        frame = FancyBboxPatch((left, 2), 36, 24, boxstyle="round,pad=0", fill=False)
        frame.set_edgecolor(ink)
        axes.add_patch(frame)
        text(left + 1.5, 23.5, f"rank {rank}", 12, weight="bold")
        _box(axes, left + 1.5, 16.5, 33, 4.5, OTHERS)
        text(left + 2.5, 18.7, "GPU: 16-bit weights, gradients", 11)
        text(left + 1.5, 13.7, "host memory, or NVMe:", 11)
        _box(axes, left + 1.5, 7.5, 11, 4.5, OTHERS)
        text(left + 2.2, 9.7, "master\nweights", 10)
        _box(axes, left + 13.5, 7.5, 14, 4.5, CODES)
        text(left + 14.5, 9.7, "codes of m and v", 10)
        _box(axes, left + 28.5, 7.5, 6, 4.5, SCALES)
        text(left + 29.1, 9.7, "scales", 10)
        text(left + 1.5, 4.6, "states: 2.05 bytes per parameter, never sent", 10)
    figure.savefig(FOLDER / f"block_{theme}.png", dpi=160, facecolor=page)


def _box(axes: Axes, x: float, y: float, width: float, height: float, color: str) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, alpha=0.55))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in INKS:
        draw(name)
