# SPDX-License-Identifier: Apache-2.0
"""Files mapped into memory."""

import errno
import os
from pathlib import Path

import torch
from torch import Tensor

from zero8.files.inside import opened_at


def mapped(path: Path, folder: Path | None = None) -> Tensor:
    """Map a file into memory, so that only the bytes used are read.

    If another process truncates the file meanwhile, access to the missing bytes raises SIGBUS.

    Args:
        path: of a file that is not empty.
        folder: a parent of it, below which links are not followed; None if all may be.

    Returns:
        (bytes,) uint8; writes to it do not reach the file.

    Raises:
        OSError: if it cannot be opened.
        ValueError: if it is empty, not a regular file, or reached through a link below the folder.
    """
    with opened_at(path, folder) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if not size_bytes:
            raise ValueError(f"{path}: got an empty file; was it cut short?")
        # torch opens files by name; this name is the open file's.
        own_name = f"/proc/self/fd/{file.fileno()}"
        try:
            return torch.from_file(own_name, size=size_bytes, dtype=torch.uint8)
        except RuntimeError as error:  # for example, too little address space
            raise OSError(errno.ENOMEM, "cannot be mapped into memory", str(path)) from error
