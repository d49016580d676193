# SPDX-License-Identifier: Apache-2.0
"""Files as memory, so that of a large one only what is looked at is read."""

import stat
from pathlib import Path

import torch
from torch import Tensor


def mapped(path: Path) -> Tensor:
    """Return the bytes of a file, (bytes,) uint8; what is written to them stays in memory.

    Raises:
        ValueError: if it is no file with bytes in it; nobody is waited for, as pipes would.
        OSError: if it cannot be opened.
    """
    info = path.stat()
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(f"{path}: got a folder, expected a file")
    if not stat.S_ISREG(info.st_mode) or not info.st_size:
        raise ValueError(f"{path}: got an empty file, or none that holds data; was it cut short?")
    open(path, "rb").close()  # raises OSError, where torch has errors of its own
    return torch.from_file(str(path), size=info.st_size, dtype=torch.uint8)
