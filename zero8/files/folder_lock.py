# SPDX-License-Identifier: Apache-2.0
"""The lock of a folder of checkpoints: one process at a time saves into it or prunes it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero8.environment import flock


@contextmanager
def locked(folder: Path, name: str = ".zero8_lock") -> Iterator[None]:
    """Hold the lock of a folder during the block.

    On a file system without locks the block runs unlocked.

    Raises:
        BlockingIOError: if another process holds it; the message says which.
        OSError: naming the lock, if it cannot be created or locked, or is not a regular file.
    """
    path = folder / name
    with flock.opened(path) as file:
        if not flock.take_where_possible(file):
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"another job saves into this folder, or prunes it: {flock.holder(file)} holds "
                f"{path}; give each job a folder of its own",
            )
        yield
