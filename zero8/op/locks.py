# SPDX-License-Identifier: Apache-2.0
"""Locks of builds: zero8's own, and those of torch's builds that it finds.

torch's is a file `lock` in the folder of the build.  A build that is killed leaves it behind, and
every later build of plain DeepSpeed waits for it without end.  The file is empty: whether its
holder lives can only be guessed, and nothing here removes one.
"""

import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from zero8 import flock

ANOTHER_PLACE = "TORCH_EXTENSIONS_DIR chooses another place"

PATIENCE_S = 10.0
"""Seconds that a process waits for a lock before it says for whom."""
QUIET_S = 3600.0
"""Seconds after which a folder that nobody writes to is no build in progress, on any host."""

# Folders that are built under our own lock, and what killed builds of them have left.
_OURS = re.compile(r"_[0-9a-f]{16}(\.killed\.\w+)?$")
_POLL_S = 0.1

logger = logging.getLogger("zero8")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a build; a process that waits for it says for whom.

    Raises:
        RuntimeError: if files cannot be written, the lock's or within the block.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with flock.opened(path) as file:
            _acquire(file, path)
            yield
    except OSError as error:
        raise RuntimeError(f"{path.parent} ({ANOTHER_PLACE}): {error}") from error


def _acquire(file: FileIO, path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not flock.take(file):
        if time.monotonic() > deadline:
            logger.warning(
                "zero8: has waited %.0f s for %s, which has locked %s to build an op. This process "
                "goes on when that one ends, however it ends. If it is gone already (the server of "
                "a network file system can keep the lock of a dead host), remove that file and "
                "start again",
                PATIENCE_S,
                flock.holder(file),
                path,
            )
            flock.wait_for(file)
            return
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class Lock:
    """A lock of a build, which somebody holds or has left behind.

    Attributes:
        path: the file.
        age_s: seconds since it was taken.
        holder: who holds it; None if that is not known.
        removable: whether nobody holds it any more, as far as can be seen from this host.
    """

    path: str
    age_s: float
    holder: str | None
    removable: bool

    def __str__(self) -> str:
        """Say whose it is and what to do."""
        if self.removable:
            said = f"left by a build that was killed; remove it: rm '{self.path}'"
        elif self.holder:
            said = f"held by {self.holder}"
        else:
            said = (
                "no process of this host builds there. If none of another host does, remove it: "
                "DeepSpeed without zero8 waits for it without end"
            )
        return f"{self.path} ({self.age_s:.0f} s old): {said}"


def find(root: Path) -> list[Lock]:
    """Return our locks that are held, and torch's that exist, in a folder of builds."""
    ours = (_of_zero8(path) for path in sorted(root.glob("*.flock")))
    # Builds that torch places itself are a folder deeper, which names Python and CUDA.
    paths = sorted({*root.glob("*/lock"), *root.glob("*/*/lock")})
    torchs = (_of_torch(path) for path in paths if not _OURS.search(path.parent.name))
    return [lock for lock in (*ours, *torchs) if lock]


def _of_zero8(path: Path) -> Lock | None:
    with suppress(OSError), FileIO(path) as file:  # it may be another user's
        if flock.is_held(file):
            return Lock(str(path), _age(path), flock.holder(file), removable=False)
    return None


def _of_torch(path: Path) -> Lock | None:
    try:
        # A file that the compiler works on may not change for minutes.
        quiet_s = min(_age(other) for other in (path.parent, *path.parent.iterdir()))
        age_s = _age(path)
    except FileNotFoundError:  # the build has just ended
        return None
    if workers := _workers(path.parent):
        return Lock(str(path), age_s, f"process {workers[0]} on {socket.gethostname()}", False)
    return Lock(str(path), age_s, None, removable=quiet_s > QUIET_S)


def _age(path: Path) -> float:
    """Return the seconds since the file was written, 0 if a server's clock is ahead."""
    return round(max(0.0, time.time() - path.stat().st_mtime), 1)


def _workers(folder: Path) -> list[int]:
    """Return the processes of this host that work in a folder: torch starts ninja there."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # it has ended, or is another user's
            if Path(os.readlink(link)).is_relative_to(folder.resolve()):
                found.append(int(link.parent.name))
    return sorted(found)
