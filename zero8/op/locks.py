# SPDX-License-Identifier: Apache-2.0
"""Locks of builds: zero8's own, and a search for torch's.

torch's lock is a file `lock` in the folder of the build.  A killed build leaves it behind, and
every later build of plain DeepSpeed waits for it forever.  The file is empty, so whether its holder
is alive can only be guessed, and nothing here removes one.
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
"""Seconds that a process waits for a lock before it logs the holder."""
QUIET_S = 3600.0
"""Seconds without writes to a folder after which no host can be building there."""

# Folders that are built under our own lock, and the remains of killed builds.
_OURS = re.compile(r"_[0-9a-f]{16}(\.killed\.\w+)?$")
_POLL_S = 0.1

logger = logging.getLogger("zero8")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a build; a process that waits for long logs the holder.

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
                "goes on when that one ends, even if it is killed. If it is gone already (the "
                "server of a network file system can keep the lock of a dead host), remove that "
                "file and start again",
                PATIENCE_S,
                flock.holder(file),
                path,
            )
            flock.wait_for(file)
            return
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class Lock:
    """A lock of a build, held or left behind.

    Attributes:
        path: the file.
        age_s: seconds since it was taken.
        holder: the process and host that hold it; None if unknown.
        removable: whether it appears to have no holder, as seen from this host.
    """

    path: str
    age_s: float
    holder: str | None
    removable: bool

    def __str__(self) -> str:
        """Return a line that names the lock and its holder, or says what to do."""
        if self.removable:
            text = f"left by a build that was killed; remove it: rm '{self.path}'"
        elif self.holder:
            text = f"held by {self.holder}"
        else:
            text = (
                "no process of this host builds there. If none of another host does, remove it: "
                "DeepSpeed without zero8 waits for it forever"
            )
        return f"{self.path} ({self.age_s:.0f} s old): {text}"


def find(root: Path) -> list[Lock]:
    """Return zero8's locks that are held, and all of torch's, in a folder of builds."""
    ours = (_of_zero8(path) for path in sorted(root.glob("*.flock")))
    # torch's own builds are one level deeper, in a folder named after Python and CUDA.
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
        # A file that the compiler is writing may not change for minutes.
        quiet_s = min(_age(other) for other in (path.parent, *path.parent.iterdir()))
        age_s = _age(path)
    except FileNotFoundError:  # the build just ended
        return None
    if workers := _workers(path.parent):
        return Lock(str(path), age_s, f"process {workers[0]} on {socket.gethostname()}", False)
    return Lock(str(path), age_s, None, removable=quiet_s > QUIET_S)


def _age(path: Path) -> float:
    """Return the seconds since the file was written, 0 if a server's clock is ahead."""
    return round(max(0.0, time.time() - path.stat().st_mtime), 1)


def _workers(folder: Path) -> list[int]:
    """Return the processes of this host whose working directory is in a folder, as ninja's is."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # it has ended, or is another user's
            if Path(os.readlink(link)).is_relative_to(folder.resolve()):
                found.append(int(link.parent.name))
    return sorted(found)
