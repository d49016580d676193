# SPDX-License-Identifier: Apache-2.0
"""Files as memory, so that of a large one only what is used is read."""

import errno
import os
from pathlib import Path

import torch
from torch import Tensor

from zero8.checkpoint.files.inside import opened


def mapped(path: Path, folder: Path | None = None) -> Tensor:
    """Return the bytes of a file mapped into memory, so that only what is used is read.

    A process that looks at bytes which another one has cut off meanwhile ends by SIGBUS; see
    `zero8.checkpoint.commands.guard`.

    Args:
        path: of a file that is not empty.
        folder: on the path; no link below it is followed.  None: the path is the caller's own.

    Returns:
        (bytes,) uint8; what is written to it stays in memory.

    Raises:
        OSError: if it cannot be opened.
        ValueError: if it is empty, no regular file, or reached through a link below the folder.
    """
    if folder is None:
        place = path.resolve()
        file = opened(place.parent, place.name)
    else:
        file = opened(folder, path.relative_to(folder).as_posix())
    with file:
        size_bytes = os.fstat(file.fileno()).st_size
        if not size_bytes:
            raise ValueError(f"{path}: got an empty file; was it cut short?")
        # torch opens files by their names; this one is that of the open file.
        own_name = f"/proc/self/fd/{file.fileno()}"
        try:
            return torch.from_file(own_name, size=size_bytes, dtype=torch.uint8)
        except RuntimeError as error:  # more than there is address space, say
            raise OSError(errno.ENOMEM, "cannot be mapped into memory", str(path)) from error
