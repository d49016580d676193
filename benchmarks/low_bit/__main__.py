# SPDX-License-Identifier: Apache-2.0
"""Show what rounding does to small updates of weights of few bits.

Writes OUT (JSON), a table (.md) and a figure (.png) beside it.

Keys of the JSON object:
    command, commit, cpu, cores, load_average, versions, seconds: what was run where.
    distances: how far weights of bfloat16 and INT8 end from the right path.
"""

import sys
from itertools import product
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import record
from benchmarks.low_bit.lost import CODES, ROUNDINGS, distance, right_path, walk

MODULE = "benchmarks.low_bit"
SHARES, STEPS = (1 / 2, 1 / 8, 1 / 64), 120
DRAWN_UPDATE, DRAWN_STEPS = 2**-10, 400
COLORS = {"nearest": "tab:red", "independent": "tab:orange", "dither": "tab:blue"}
WORDS = (
    f"4096 weights start at 1 and get the same update in each of {STEPS} steps; bfloat16, or INT8 "
    "with a scale per row of 1/32. Updates and distances are in codes. Distances are from the "
    "right path: of all weights after the last step, and the largest of any weight after any step."
)


def markdown(result: dict) -> list[str]:
    """Return the lines of the table of a result."""
    rows = result["distances"]
    cells = [[x if isinstance(x, str) else record.number(x) for x in row.values()] for row in rows]
    return [WORDS, "", *record.table_lines(list(rows[0]), cells)]


def draw(path: Path) -> None:
    """Draw the path of a weight by rounding, for both formats."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(panels, CODES, strict=True):
        right = right_path(DRAWN_UPDATE, DRAWN_STEPS)
        axes.plot(right, color="black", linestyle="--", label="float32")
        for rounding, color in COLORS.items():
            weights = walk(name, rounding, DRAWN_UPDATE, DRAWN_STEPS)[:, 0]
            style = {"color": color, "linewidth": 1, "drawstyle": "steps-post"}
            axes.plot(weights, label=rounding, **style)
        axes.set(title=f"weight in {name}", xlabel="step")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("weight")
    panels[0].legend(loc="upper left")
    figure.suptitle(f"A weight of 1 that gets an update of {DRAWN_UPDATE:.3f} in every step")
    record.write_png(figure, path)


def main() -> None:
    """Measure and write all files."""
    out = record.parser(MODULE, __doc__).parse_args().json
    kinds = product(CODES, SHARES, ROUNDINGS)
    result = {**record.environment(MODULE), "distances": [distance(*k, STEPS) for k in kinds]}
    record.write(result, out, markdown, "Small updates of weights of few bits")
    draw(out.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
