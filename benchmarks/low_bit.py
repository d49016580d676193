# SPDX-License-Identifier: Apache-2.0
"""Show what rounding does to small updates of weights of few bits.

Writes OUT (JSON), a table (.md) and a figure (.png) beside it.

All weights start at 1 and get the same update in every step.  Both codes have 1 exactly:

- bfloat16: from 1 to 2 neighbours are 1/128 apart.
- INT8 with a scale per row, as weights of quantized training have.  The row's largest weight, which
  gets no update, is 127/32, as in a row of 16000 normal weights whose standard deviation is 1.  So
  the scale stays 1/32, and 1 has the code 32.

Updates are powers of 2, so that float32 weights are exact sums.  The numbers of steps keep weights
below 2 and below the largest code.
"""

import sys
from itertools import product
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks import record
from zero8.spec import dither
from zero8.spec.grid import BlockGrid
from zero8.spec.reference import stochastic_bfloat16

MODULE = "benchmarks.low_bit"
SHARES, STEPS = (1 / 2, 1 / 8, 1 / 64), 120
DRAWN_UPDATE, DRAWN_STEPS = 2**-10, 400
COLORS = {"nearest": "tab:red", "independent": "tab:orange", "dither": "tab:blue"}
WORDS = (
    f"4096 weights start at 1 and get the same update in each of {STEPS} steps; bfloat16, or INT8 "
    "with a scale per row of 1/32. Updates and distances are in codes. Distances are from the "
    "right path: of all weights after the last step, and the largest of any weight after any step."
)
NUMEL = 4096
GRID = BlockGrid(num_rows=16, row_length=256, block_size=256)
THRESHOLDS = 2**16
LARGEST_CODE = 127
CODES = {"bfloat16": 1 / 128, "INT8": 1 / 32}
"""The distance of two codes, where the weights are."""


def independent(step: int) -> Tensor:
    """Return thresholds from a generator that is new at each step, (NUMEL,) int64."""
    generator = torch.Generator().manual_seed(dither.stream_key(0, step, "weight"))
    return torch.randint(THRESHOLDS, (NUMEL,), generator=generator)


def golden(step: int) -> Tensor:
    """Return zero8's thresholds, (NUMEL,)."""
    key = dither.stream_key(0, dither.identity_of("weight"), "param")
    return dither.in_blocks(dither.phase_of(key, step), 0, NUMEL, GRID)


ROUNDINGS = {"nearest": lambda step: None, "independent": independent, "dither": golden}
"""The thresholds of a step, 0 to 65535; None: to nearest."""


def rounded(number_format: str, weights: Tensor, thresholds: Tensor | None) -> Tensor:
    """Return the stored values of weights, float32.

    A code of INT8 is floor(x + (threshold + 0.5) / 65536), whose mean over all thresholds is x, up
    to 2^-17.
    """
    if number_format == "bfloat16":
        if thresholds is None:
            return weights.bfloat16().float()
        return stochastic_bfloat16(weights, thresholds.long()).float()
    scaled = weights / CODES[number_format]
    if thresholds is None:
        codes = scaled.round()
    else:
        codes = (scaled + (thresholds.float() + 0.5) / THRESHOLDS).floor()
    return CODES[number_format] * codes.clamp(-LARGEST_CODE, LARGEST_CODE)


def walk(number_format: str, rounding: str, update: float, steps: int) -> Tensor:
    """Return the weights before the first and after every step, (steps + 1, NUMEL) float32."""
    found = [torch.ones(NUMEL)]
    for step in range(1, steps + 1):
        found.append(rounded(number_format, found[-1] + update, ROUNDINGS[rounding](step)))
    return torch.stack(found)


def right_path(update: float, steps: int) -> Tensor:
    """Return what `walk` would be without rounding, for one weight: (steps + 1,) float32."""
    return 1 + update * torch.arange(steps + 1)


def distance(number_format: str, share: float, rounding: str, steps: int) -> dict:
    """Return how far weights are from the right path; it and the update `share` are in codes."""
    code = CODES[number_format]
    right = right_path(share * code, steps)[:, None]
    errors = (walk(number_format, rounding, share * code, steps) - right).double() / code
    return {
        "weights": number_format,
        "rounding": rounding,
        "update": share,
        "RMS distance": errors[-1].square().mean().sqrt().item(),
        "mean distance": errors[-1].mean().item(),
        "largest distance": errors.abs().max().item(),
    }


def markdown(result: dict) -> list[str]:
    """Return the lines of the table of a result."""
    rows = result["distances"]
    forms = [record.TEXT] * 2 + [record.NUMBER] * 4
    columns = {key: (key, form) for key, form in zip(rows[0], forms, strict=True)}
    return [WORDS, "", *record.table_of(rows, columns)]


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
