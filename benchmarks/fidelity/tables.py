# SPDX-License-Identifier: Apache-2.0
"""Cells that several of the tables share."""

LOSS_HEADERS = ["seeds", "steps", "validation loss", "std", "minus fp32", "std"]


def number(value: float) -> str:
    """Return a number of any size in three significant digits."""
    return f"{value:.3g}"


def loss_cells(row: dict) -> list[str]:
    """Return the cells under LOSS_HEADERS."""
    return [
        str(len(row["seeds"])),
        str(row["steps"]),
        f"{row['val_loss_mean']:.4f}",
        f"{row['val_loss_std']:.4f}",
        f"{row['difference_mean']:+.4f}",
        f"{row['difference_std']:.4f}",
    ]
