# SPDX-License-Identifier: Apache-2.0
"""Heat maps over the pairs of codes: how often each is used, and its errors."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor

from benchmarks.maps.codes import NAMES
from benchmarks.maps.pairs import NUM_CODES, PairTally
from benchmarks.maps.png import write_png


@dataclass(frozen=True)
class Quantity:
    """A row of heat maps.

    Attributes:
        label: of the color bar, with the unit.
        of: returns the quantity of every pair, [code of m, code of v].
        decades: exponents of ten at the ends of the colors, in half decades.
    """

    label: str
    of: Callable[[PairTally], Tensor]
    decades: tuple[int, int]

    def edges(self) -> np.ndarray:
        """Return the limits of the colors, two to a decade: few colors keep the file small."""
        first, last = self.decades
        return 10.0 ** np.linspace(first, last, 2 * (last - first) + 1)


QUANTITIES = (
    Quantity("share of the elements", PairTally.share, (-8, -2)),
    Quantity("mean |error of u|", PairTally.absolute_error, (-5, 1)),
    Quantity("mean |error of u| / |u|", PairTally.relative_error, (-4, 2)),
)


def draw_pairs(tallies: dict[tuple[str, str], PairTally], grain: str, path: Path) -> None:
    """Draw the heat maps of every map with one grain."""
    figure = Figure(figsize=(3 * len(NAMES) + 1, 9.4), layout="constrained")
    grid = figure.subplots(len(QUANTITIES), len(NAMES), sharex=True, sharey=True)
    for axes_of_row, quantity in zip(grid, QUANTITIES, strict=True):
        norm = BoundaryNorm(quantity.edges(), colormaps["viridis"].N, extend="both")
        for axes, name in zip(axes_of_row, NAMES, strict=True):
            image = _draw(axes, quantity.of(tallies[name, grain]), norm)
        ticks, format_ = quantity.edges()[::2], "{x:.0e}"
        figure.colorbar(image, ax=axes_of_row, label=quantity.label, ticks=ticks, format=format_)
        axes_of_row[0].set_ylabel("code of v, by value")
    for name, top, bottom in zip(NAMES, grid[0], grid[-1], strict=True):
        top.set_title(name)
        bottom.set_xlabel("code of m, by value")
    figure.suptitle(
        f"Pairs of codes after one quantization, one scale per {grain}; white: not used"
    )
    write_png(figure, path)


def _draw(axes: Axes, values: Tensor, norm: BoundaryNorm) -> AxesImage:
    ticks = range(0, NUM_CODES + 1, 64)
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    shown = np.ma.masked_invalid(values.numpy().T)  # columns are codes of m
    return axes.imshow(shown, norm=norm, cmap="viridis", origin="lower", interpolation="nearest")
