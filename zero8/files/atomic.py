# SPDX-License-Identifier: Apache-2.0
"""Atomic writes of files.

After a loss of power a file has its contents only if it was synced, and its name only if its folder
was.
"""

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".zero8-tmp"
"""The suffix of files that `write_atomically` has not finished."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that at any time, even after a loss of power, it is the old or the new one.

    A link of that name is replaced, and its target is unchanged.
    """
    # A random name, so that nobody can put a link there before.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk; a no-op on file systems without such a sync."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
