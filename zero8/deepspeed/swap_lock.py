# SPDX-License-Identifier: Apache-2.0
"""A lock on each folder of swap files: two jobs would overwrite each other's states.

DeepSpeed numbers the files from a counter of the process, so two jobs with one `nvme_path` use the
same names, while engines of one process do not.  The process holds the lock until it ends, in any
way.  The lock lies beside the folder, whose files DeepSpeed copies into every checkpoint.
"""

import errno
from io import FileIO
from pathlib import Path

from zero8.environment import flock
from zero8.environment.agree import raise_together

_ours: dict[Path, FileIO] = {}


def take(folder: str) -> None:
    """Lock a folder for this process; raise OSError, with its holder, if another has the lock."""
    path = Path(f"{Path(folder).resolve()}.flock")
    if path in _ours:
        return
    file = flock.opened(path)
    if not flock.take_where_possible(file):
        with file:
            raise OSError(
                errno.EBUSY,
                f"in use: {flock.holder(file)} keeps its optimizer states there; give each job an "
                "nvme_path of its own",
                folder,
            )
    _ours[path] = file


def take_on_all(folder: str) -> None:
    """Lock the folder of each rank; raise OSError on all ranks if one cannot."""
    error = None
    try:
        take(folder)
    except OSError as caught:
        error = caught
    raise_together(error, "keep optimizer states on NVMe")
