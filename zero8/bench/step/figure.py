# SPDX-License-Identifier: Apache-2.0
"""The step result as a figure."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from zero8.bench.step.report import where
from zero8.bench.step.variants import CUDA_VARIANTS

TITLES = {variant.name: variant.title for variant in CUDA_VARIANTS}
COLORS = {"zero8": "tab:blue", "other optimizers": "tab:orange"}
# Bars are cut at this multiple of zero8's default.
LONGEST = 3.0


def plot(result: dict, path: Path) -> None:
    """Draw, per algorithm and kind of parameter, each step's time and the copy of its memory."""
    steps = [row for row in result["rows"] if row["name"] != "copy"]
    ceilings = {_kind(r): r["ns_per_param"] for r in result["rows"] if r["name"] == "copy"}
    kinds = dict.fromkeys(map(_kind, steps))
    groups = [[row for row in steps if _kind(row) == kind] for kind in kinds]
    heights = [len(group) + 1 for group in groups]
    figure = Figure(figsize=(9, 1.5 + 0.36 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(groups), 1, sharex=True, height_ratios=heights)
    longest = LONGEST * max(row["ns_per_param"] for row in steps if _is_default(row, result))
    for axes, group, (algorithm, variant) in zip(grid, groups, kinds, strict=True):
        _draw(axes, group, ceilings, longest)
        axes.set_title(f"{algorithm}, {TITLES[variant]}", loc="left", fontsize=10)
    grid[-1].set_xlabel("ns per parameter")
    grid[-1].set_xlim(0, longest)
    _add_legend(figure)
    figure.suptitle(f"Optimizer step, {result['numel']:,} parameters, {where(result)}")
    figure.savefig(path, dpi=150)


def _kind(row: dict) -> tuple[str, str]:
    return row["algorithm"], row["variant"]


def _is_default(row: dict, result: dict) -> bool:
    return row["codec"] == result["tensor_list"]["codec"]


def _draw(
    axes: Axes, rows: list[dict], ceilings: dict[tuple[str, str], float], longest: float
) -> None:
    names = [" ".join(filter(None, (row["name"], row["codec"]))) for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.2)
    for y, row in enumerate(rows):
        ns, color = row["ns_per_param"], COLORS.get(row["name"], COLORS["other optimizers"])
        axes.barh(y, min(ns, longest), color=color, height=0.7)
        spread = [row["ns_per_param_p10"], row["ns_per_param_p90"]]
        axes.plot(spread, [y, y], color="black", alpha=0.5, linewidth=1)
        ceiling = ceilings[row["algorithm"], row["ceiling"]]
        axes.plot([ceiling, ceiling], [y - 0.4, y + 0.4], color="red", linewidth=2)
        _write_time(axes, y, row, longest)


def _write_time(axes: Axes, y: float, row: dict, longest: float) -> None:
    """Write the time behind its bar, or into it if there is no room."""
    ns, end = row["ns_per_param"], max(row["ns_per_param"], row["ns_per_param_p90"])
    text = {"va": "center", "fontsize": 8}
    if end < 0.92 * longest:
        axes.text(end, y, f" {ns:.3g}", ha="left", **text)
    else:
        axes.text(min(ns, longest), y, f"{ns:.3g} ", ha="right", color="white", **text)


def _add_legend(figure: Figure) -> None:
    handles: list[Patch | Line2D] = [Patch(color=color, label=k) for k, color in COLORS.items()]
    handles.append(Line2D([], [], color="red", linewidth=2, label="copy of the same memory"))
    handles.append(Line2D([], [], color="black", alpha=0.5, linewidth=1, label="10 to 90 %"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
