# SPDX-License-Identifier: Apache-2.0
"""File locks that end with the process that holds them, and name it.

The operating system releases a lock when its holder ends in any way; its file stays.  filelock,
which torch requires, names no holder, and would use any file that has the lock's name.
"""

import errno
import fcntl
import logging
import os
import socket
import stat
import time
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path

LONGEST_NAME_BYTES = 200

_ENOTSUPP = 524  # of the kernel, which some network file systems return to programs
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EINVAL, _ENOTSUPP}
"""The errors of file systems without locks; others, such as EIO, are failures of the disk."""

logger = logging.getLogger("zero8")


def opened(path: Path) -> FileIO:
    """Open the file of a lock, or create it; raise OSError if it is a symbolic or hard link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = FileIO(str(path), "r+", opener=lambda name, _: os.open(name, flags, 0o666))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        problem = "got a symbolic link, expected a lock of zero8's; remove it"
        raise OSError(errno.ELOOP, problem, str(path)) from None
    info = os.fstat(file.fileno())
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
        file.close()
        problem = "got another program's file, expected a lock of zero8's; remove it"
        raise OSError(errno.EINVAL, problem, str(path))
    return file


def take(file: FileIO, *, waits: bool = False) -> bool:
    """Take the lock of a file until it is closed; return whether it was free, or wait for it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # of the same class, as the number decides it
        raise OSError(error.errno, f"cannot be locked: {error.strerror}", file.name) from error
    _write_holder(file)
    return True


def take_where_possible(file: FileIO) -> bool:
    """Do the same as `take`, but on a file system without locks return True, and log it once."""
    try:
        return take(file)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        _tell_of_no_locks(Path(file.name).parent, str(error))
    return True


@cache
def _tell_of_no_locks(folder: Path, problem: str) -> None:
    logger.warning("%s: two jobs that write there at once are not noticed: %s", folder, problem)


def holder(file: FileIO) -> str:
    """Return the holder of the lock of a file, as the holder has written it there.

    Reads the open file: the path may have become a pipe, which would block.
    """
    name = os.pread(file.fileno(), LONGEST_NAME_BYTES, 0).decode(errors="replace").strip()
    return name or "an unknown process"


def _write_holder(file: FileIO) -> None:
    """Write this process into the file of a lock as its holder; a full disk is ignored."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with suppress(OSError):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
