# SPDX-License-Identifier: Apache-2.0
"""The fidelity result as a figure."""

from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.fidelity.report import betas_of, rows_at
from benchmarks.fidelity.schemes import FP32_CONTROL
from benchmarks.fidelity.tables import number

COLORS = {"zero8": "tab:blue", "package": "tab:orange", "reimplemented": "tab:green"}


def plot(result: dict, path: Path) -> None:
    """Draw, per beta2, the update errors and the largest |u| of every scheme."""
    panels = {
        beta2: [row for row in rows_at(result, beta2) if row["scheme"] != FP32_CONTROL]
        for beta2 in betas_of(result)
    }
    longest = max(map(len, panels.values()))
    size = (11, 1 + len(panels) * (0.8 + 0.38 * longest))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(panels), 2, squeeze=False, sharex="col")
    for (errors, largest), (beta2, rows) in zip(grid, panels.items(), strict=True):
        rows.sort(key=lambda row: -row["rms_update_error"])
        _draw_errors(errors, rows)
        _draw_largest(largest, rows)
        errors.set_title(f"beta2 = {beta2}", loc="left")
    grid[-1][0].set_xlabel("error of the update u, in units of RMS(u)")
    grid[-1][1].set_xlabel("largest |u| of the run")
    _add_legend(figure, {r["implementation"]: None for rows in panels.values() for r in rows})
    figure.suptitle(
        f"Updates of Adam with compressed states against fp32 Adam, {result['steps']} steps"
    )
    figure.savefig(path, dpi=150)


def _prepare(axes: Axes, rows: list[dict]) -> None:
    names = [
        f"{row['scheme']}, {row['bytes_per_param']:.2f} B"
        + (f", blocks of {row['block_size']}" if row["block_size"] else "")
        for row in rows
    ]
    axes.set_yticks(range(len(rows)), names)
    axes.set(xscale="log", ylim=(-0.6, len(rows) - 0.2))
    axes.margins(x=0.1)
    axes.grid(axis="x", which="both", alpha=0.2)


def _draw_errors(axes: Axes, rows: list[dict]) -> None:
    _prepare(axes, rows)
    for y, row in enumerate(rows):
        color = COLORS[row["implementation"]]
        rms, tail = row["rms_update_error"], row["p999_update_error"]
        axes.plot([rms, tail], [y, y], color=color, alpha=0.35, linewidth=2)
        axes.plot(rms, y, "o", color=color)
        axes.plot(tail, y, "|", color=color, markersize=12, markeredgewidth=2)
        _annotate(axes, rms, y)


def _draw_largest(axes: Axes, rows: list[dict]) -> None:
    _prepare(axes, rows)
    axes.tick_params(labelleft=False)
    axes.axvline(rows[0]["max_abs_u_bound"], color="black", linestyle="--", linewidth=1)
    for y, row in enumerate(rows):
        axes.plot(row["max_abs_u"], y, "o", color=COLORS[row["implementation"]])
        _annotate(axes, row["max_abs_u"], y)


def _annotate(axes: Axes, x: float, y: float) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
    axes.annotate(
        number(x), (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=8, bbox=box
    )


def _add_legend(figure: Figure, implementations: Iterable[str]) -> None:
    styles = {name: {"marker": "s", "color": COLORS[name]} for name in implementations}
    styles["RMS error, largest |u|"] = {"marker": "o", "color": "gray"}
    styles["99.9 % of errors"] = {"marker": "|", "color": "gray", "markersize": 12}
    handles = [Line2D([], [], linestyle="none", label=n, **style) for n, style in styles.items()]
    bound = "bound on |u| (Cauchy-Schwarz)"
    handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1, label=bound))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
