# SPDX-License-Identifier: Apache-2.0
"""Where a rank's warnings go: into a file, so that the screen shows progress and errors."""

import logging
from pathlib import Path

# Warnings of Python code, torch among it, once they are captured; and messages of packages.
NAMES = ("py.warnings", "DeepSpeed", "torchao")


def log_warnings(path: Path) -> None:
    """Send warnings of this process to a new file; errors still show on the screen, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file, screen = logging.FileHandler(path, mode="w"), logging.StreamHandler()
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    screen.setLevel(logging.ERROR)
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers[:] = [file, screen]
        logger.propagate = False
    logging.captureWarnings(True)
