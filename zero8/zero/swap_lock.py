# SPDX-License-Identifier: Apache-2.0
"""One job for each folder of swap files: two would write over each other's states.

DeepSpeed names the files after its own counts, so those of two jobs with one `nvme_path` are the
same.  A lock beside the folder belongs to the process until it ends, however it ends: engines of
one process share a folder, as their counts go on.  DeepSpeed copies the folder itself with every
checkpoint, and the lock must not be in it.
"""

import errno
from io import FileIO
from pathlib import Path

from zero8 import flock
from zero8.ranks.agree import raise_together

_ours: dict[Path, FileIO] = {}


def take(folder: str) -> None:
    """Make a folder this process's own.

    Raises:
        OSError: naming the process that has it; if its lock cannot be opened.
    """
    path = Path(f"{Path(folder).resolve()}.flock")
    if path in _ours:
        return
    file = flock.opened(path)
    if not flock.take(file):
        with file:
            raise OSError(
                errno.EBUSY,
                f"in use: {flock.holder(file)} keeps its optimizer states there; give each job an "
                "nvme_path of its own",
                folder,
            )
    _ours[path] = file


def take_on_all(folder: str) -> None:
    """Make the folders of all ranks their own.  All ranks must call it.

    Raises:
        OSError: on all ranks, if one cannot have its folder; it says which and why.
    """
    error = None
    try:
        take(folder)
    except OSError as caught:
        error = caught
    raise_together(error, "keep optimizer states on NVMe")
