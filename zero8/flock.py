# SPDX-License-Identifier: Apache-2.0
"""File locks that end with the process that holds them, and name it.

The operating system releases them however their holder ends; their files stay.  filelock, which
torch requires, names no holder, and takes another program's file that has the lock's name.
"""

import errno
import fcntl
import os
import socket
import stat
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path

LONGEST_NAME_BYTES = 200


def opened(path: Path) -> FileIO:
    """Open the file of a lock, to be read and written; it is made where there is none.

    Raises:
        OSError: if it cannot be opened, or is a link, or a second name of another file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = FileIO(os.open(path, flags, 0o666), "r+")
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


def take(file: FileIO) -> bool:
    """Take the lock of a file until that is closed, if it is free; return whether it was.

    Raises:
        OSError: if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    _sign(file)
    return True


def wait_for(file: FileIO) -> None:
    """Take the lock of a file until that is closed, when its holder has released it."""
    fcntl.flock(file, fcntl.LOCK_EX)
    _sign(file)


def is_held(file: FileIO) -> bool:
    """Return whether another process holds the lock of a file, which need only be readable."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def holder(file: FileIO) -> str:
    """Return who holds the lock of a file, as far as that process has said.

    It reads the file that was opened: by now its name may be a pipe's, which would keep it waiting.
    """
    name = os.pread(file.fileno(), LONGEST_NAME_BYTES, 0).decode(errors="replace").strip()
    return name or "another process, which has not said who it is"


def _sign(file: FileIO) -> None:
    """Write into the file of a lock which process holds it; on a full disk nothing is written."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with suppress(OSError):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
