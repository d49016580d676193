# SPDX-License-Identifier: Apache-2.0
"""The plot of `zero8 plan --plot`: memory by place, and the time of the step."""

from pathlib import Path

from matplotlib.figure import Figure

from zero8.plan.memory import GPU, HOST, NVME, Row, rows_of
from zero8.plan.model import Model
from zero8.plan.report import GIB
from zero8.plan.setup import Setup
from zero8.plan.step_time import Hardware, step_times


def plot(model: Model, setup: Setup, hardware: Hardware, path: Path) -> None:
    """Draw stacked bars of the memory of each place, and the step times, side by side."""
    rows, ranks = rows_of(model, setup), setup.ranks_here
    titles = {GPU: ("each GPU", 1), HOST: ("each host", ranks), NVME: ("NVMe of a host", ranks)}
    places = [place for place in titles if any(row.place == place for row in rows)]
    times = step_times(model, setup, hardware)
    count = len(places) + (times is not None)
    figure = Figure((4 * count, 5), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for place, one in zip(places, axes, strict=False):
        title, scale = titles[place]
        _stack(one, [row for row in rows if row.place == place], scale, setup.optimizers)
        one.set(title=f"{title}, GiB")
    if times is not None:
        axes[-1].bar(setup.optimizers, [1e3 * one.seconds for one in times])
        axes[-1].set(title="optimizer step, ms (estimated)")
    figure.suptitle(f"{model.title}\n{setup.describe()}", fontsize=9)
    figure.savefig(path, dpi=120)


def _stack(axes, rows: list[Row], scale: int, optimizers: tuple[str, str]) -> None:
    heights = [0.0, 0.0]
    for row in rows:
        values = [scale * value / GIB for value in (row.fp32_bytes, row.zero8_bytes)]
        axes.bar(optimizers, values, bottom=heights, label=row.what)
        heights = [below + value for below, value in zip(heights, values, strict=True)]
    axes.set_ylim(0, 1.4 * max(heights))  # leaves room for the legend
    axes.legend(fontsize=7)
