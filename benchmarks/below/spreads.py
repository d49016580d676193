# SPDX-License-Identifier: Apache-2.0
"""How unlike each other the v are that would share a number, matrix by matrix, in an fp32 run."""

from collections.abc import Callable

from torch import Tensor

from benchmarks.below.shared import is_matrix
from benchmarks.fidelity.losses import train
from benchmarks.fidelity.training import Recipe, TrainingRun, adamw

SIZE = 64


def spreads(recipe: Recipe, on_step: Callable[[], None]) -> list[dict]:
    """Train with fp32 AdamW and return a row per matrix: standard deviations of log2(sqrt(v)).

    `row` and `column` are those within 64 neighbours of a row and of a column, `tile` those of
    what the best product of a factor per row and one per column leaves in tiles of 64 x 64.
    """
    run = TrainingRun(recipe)
    optimizer = adamw(run.model, recipe)
    train(run, optimizer, on_step)
    return [
        {"matrix": name, "shape": list(p.shape), **spreads_of(optimizer.state[p]["exp_avg_sq"])}
        for name, p in run.model.named_parameters()
        if is_matrix(p)
    ]


def spreads_of(v: Tensor) -> dict:
    """Return the spreads of a matrix, rows without any gradient left out."""
    rows = v[(v > 0).any(1)]
    rows = rows[: len(rows) // SIZE * SIZE or len(rows)].clamp(min=1e-38).log2() / 2
    tiles = rows.unflatten(0, (-1, min(SIZE, len(rows)))).unflatten(2, (-1, SIZE))
    by_row, by_column = (tiles - tiles.mean(dim, keepdim=True) for dim in (3, 1))
    rest = by_row - by_row.mean(1, keepdim=True)
    parts = {"row": by_row, "column": by_column, "tile": rest}
    return {name: part.square().mean().sqrt().item() for name, part in parts.items()}
