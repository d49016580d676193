# SPDX-License-Identifier: Apache-2.0
"""The result of whole engines as a figure."""

from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zero8.bench.engine.report import kind_of

OURS, OTHERS = "tab:blue", "tab:orange"
REST_ALPHA = 0.4


def plot(result: dict, path: Path) -> None:
    """Draw the engines' steps, a panel per engine and limit: the optimizer's step and the rest.

    Bars that are longer than twice the longest float32 one are cut.
    """
    groups = [(kind, list(rows)) for kind, rows in groupby(result["rows"], kind_of)]
    heights = [len(rows) + 1 for _, rows in groups]
    figure = Figure(figsize=(9, 1.5 + 0.36 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(groups), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    longest = 2 * max(row["phase_ms"] for row in result["rows"] if "bf16" not in row["over"])
    for axes, (kind, rows) in zip(grid, groups, strict=True):
        _draw(axes, rows, longest)
        axes.set_title(kind, loc="left", fontsize=10)
    grid[-1].set_xlabel("ms")
    grid[-1].set_xlim(0, longest)
    _add_legend(figure)
    figure.suptitle(
        f"From the last gradient to the next forward, {result['numel']:,} parameters,\n"
        f"{result['world_size']} rank(s) of {result['threads']} thread(s), {result['cpu']}, "
        f"{result['isa']}",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, rows: list[dict], longest: float) -> None:
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.2)
    for y, row in enumerate(rows):
        inner, total = row["inner_ms"], row["phase_ms"]
        color = OURS if row["name"].startswith("zero8") else OTHERS
        axes.barh(y, inner, color=color, height=0.7)
        axes.barh(y, total - inner, left=inner, color=color, alpha=REST_ALPHA, height=0.7)
        axes.plot([row["phase_ms_p10"], row["phase_ms_p90"]], [y, y], color="black", alpha=0.5)
        text = f" {total:.1f} ms, {row['ratio']:.2f}x "
        end = max(total, row["phase_ms_p90"])
        if end < 0.8 * longest:
            axes.text(end, y, text, va="center", fontsize=8)
        else:
            axes.text(longest, y, text, va="center", ha="right", fontsize=8)


def _add_legend(figure: Figure) -> None:
    handles = [
        Patch(color=OURS, label="zero8: optimizer's step"),
        Patch(color=OURS, alpha=REST_ALPHA, label="the rest"),
        Patch(color=OTHERS, label="others: optimizer's step"),
        Patch(color=OTHERS, alpha=REST_ALPHA, label="the rest"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
