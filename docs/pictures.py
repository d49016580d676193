# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README and docs/how-it-works.md, for light and dark pages.

Run `python docs/pictures.py` in a checkout.  Fonts are legible where a phone shows a picture 360
pixels wide.
"""

from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from zero8.spec.codec import CODECS

FOLDER = Path(__file__).resolve().parent / "pictures"
INKS = {"light": ("#1f2328", "#ffffff"), "dark": ("#e6edf3", "#0d1117")}
"""Colors of text and page."""
CODES, SCALES, OTHERS, MORE = "#4493f8", "#f0883e", "#8b949e", "#3fb950"
MEDIAN_OCTAVES = 2.6
"""That v spans in the median block: benchmarks/records/maps_202611.md."""
PASSES = {
    "ZeRO-2,\nDeepSpeed": (52.1, 28.0, 8.0, 6.0, 4.0),
    "ZeRO-2,\nzero8": (20.1, 16.1),
    "ZeRO-3,\nDeepSpeed": (46.3, 28.0, 8.0, 6.0),
    "ZeRO-3,\nzero8": (20.3, 16.1),
}
"""Milliseconds, and bytes per parameter of each pass: engine_cpu_avx512_202611.md, fp32 masters."""
NAMES = ("optimizer's step", "unscale and clip", "round weights", "copy weights")


def main() -> None:
    """Write each picture in both themes."""
    FOLDER.mkdir(exist_ok=True)
    for theme, (ink, page) in INKS.items():
        for name, draw, height in (
            ("block", block, 5.6),
            ("codes", codes, 4.6),
            ("passes", passes, 3.9),
        ):
            figure = Figure(figsize=(6.4, height), facecolor=page)
            draw(figure, ink)
            figure.savefig(FOLDER / f"{name}_{theme}.png", dpi=200, facecolor=page)


def block(figure: Figure, ink: str) -> None:
    """Draw a block, and where its parts are under ZeRO on two ranks."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 64), ylim=(0, 56))
    axes.set_axis_off()

    def text(x: float, y: float, words: str, size: float = 12, **more: Any) -> None:
        axes.text(x, y, words, color=ink, fontsize=size, va="center", **more)

    text(2, 53, "A block: 256 numbers of a moment", 14, weight="bold")
    for number in range(16):
        _box(axes, 2 + 1.6 * number, 46, 1.3, 4, OTHERS)
        _box(axes, 35 + 1.1 * number, 46, 0.8, 4, CODES)
    _box(axes, 56.5, 46, 4, 4, SCALES)
    axes.annotate("", (34, 48), (28, 48), arrowprops={"arrowstyle": "-|>", "color": ink, "lw": 2})
    for x, words in (
        (2, "float32:\n1,024 bytes"),
        (35, "256 codes:\n256 bytes"),
        (54, "scale:\n4 bytes"),
    ):
        text(x, 42.5, words)

    text(2, 36, "Under ZeRO each rank keeps its own shard", 14, weight="bold")
    for rank, left in enumerate((2, 33)):
        frame = FancyBboxPatch((left, 2), 29, 31, boxstyle="round,pad=0", fill=False, ec=ink)
        axes.add_patch(frame)
        text(left + 1.5, 30.5, f"rank {rank}", 13, weight="bold")
        _box(axes, left + 1.5, 23.5, 26, 4.5, OTHERS)
        text(left + 2.3, 25.7, "GPU: weights, gradients")
        text(left + 1.5, 21, "host memory or NVMe:")
        _box(axes, left + 1.5, 14.5, 26, 4.5, OTHERS)
        text(left + 2.3, 16.7, "master weights")
        _box(axes, left + 1.5, 9, 17, 4.5, CODES)
        text(left + 2.3, 11.2, "codes of m, v")
        _box(axes, left + 19.5, 9, 8, 4.5, SCALES)
        text(left + 20, 11.2, "scales")
        text(left + 1.5, 5, "2.05 bytes/parameter,\nnever sent", 11)


def codes(figure: Figure, ink: str) -> None:
    """Draw the values of the codes of `log` and of the paper's dynamic map."""
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(left=0.17, right=0.97, top=0.91, bottom=0.14, hspace=0.5)
    log, dynamic = CODECS["log"], CODECS["dynamic"]
    step = 2.0 ** (-MEDIAN_OCTAVES / 254)
    values = {
        upper: (log.of_signed.narrow.levels, dynamic.of_signed.levels),
        lower: (step ** torch.arange(255.0), dynamic.of_unsigned.levels),
    }
    titles = ("m: one sign's codes", "v: codes in a median block")
    for (axes, (ours, papers)), title in zip(values.items(), titles, strict=True):
        _plain(axes, ink)
        axes.set_title(title, color=ink, fontsize=14, loc="left", weight="bold")
        for y, levels, color in ((1, ours, CODES), (0, papers, SCALES)):
            levels = levels[levels > 0] / levels.max()
            axes.vlines(levels, y - 0.36, y + 0.36, color=color, lw=0.8)
        axes.set(xscale="log", xlim=(1e-7, 1.3), ylim=(-0.6, 1.6))
        axes.set_yticks((1, 0), ("log", "dynamic"))
    lower.axvspan(2.0**-MEDIAN_OCTAVES, 1, color=OTHERS, alpha=0.35, lw=0)
    inside = int((values[lower][1] >= 2.0**-MEDIAN_OCTAVES).sum())
    words = f"the block's values (grey):\n255 codes of log, {inside} of dynamic"
    lower.text(0.1, 1.05, words, color=ink, fontsize=12, ha="right", va="center")
    lower.set_xlabel("value / largest of the block", color=ink, fontsize=13)


def passes(figure: Figure, ink: str) -> None:
    """Draw the bytes per parameter that `engine.step()` moves, before and after."""
    axes = figure.add_axes((0.19, 0.3, 0.79, 0.67))
    _plain(axes, ink)
    for row, (ms, *parts) in enumerate(PASSES.values()):
        left = 0.0
        for name, width, color in zip(NAMES, parts, (CODES, SCALES, OTHERS, MORE), strict=False):
            axes.barh(row, width, left=left, color=color, height=0.66, label=name)
            axes.text(left + width / 2, row, f"{width:g}", fontsize=12, ha="center", va="center")
            left += width
        axes.text(left + 0.6, row, f"{ms} ms", color=ink, fontsize=13, va="center", weight="bold")
    axes.set(xlim=(0, 56), ylim=(3.5, -0.5))
    axes.set_yticks(range(4), list(PASSES))
    axes.set_xlabel("bytes per parameter", color=ink, fontsize=13)
    handles, labels = axes.get_legend_handles_labels()
    how = {"loc": "lower center", "ncols": 2, "frameon": False, "fontsize": 12, "labelcolor": ink}
    figure.legend(handles[:4], labels[:4], **how)


def _plain(axes: Axes, ink: str) -> None:
    axes.set_facecolor("none")
    axes.tick_params(colors=ink, labelsize=12)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(ink)
    axes.tick_params(axis="y", length=0)


def _box(axes: Axes, x: float, y: float, width: float, height: float, color: str) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, alpha=0.55))


if __name__ == "__main__":
    main()
