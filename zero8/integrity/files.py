# SPDX-License-Identifier: Apache-2.0
"""Files that are there in whole or not at all, their hashes, and a lock that dies with its holder.

After a loss of power a file has its contents only if it was synced, and its name only if its folder
was.
"""

import errno
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES = 4 << 20
TEMPORARY = ".zero8-tmp"
"""The end of the name of a file that `write_atomically` has not finished."""

Progress = Callable[[int], object]
"""Called with the number of bytes read since the last call."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that at any time, even after a loss of power, it is the old or the new one.

    A link of that name is replaced; the file that it leads to stays as it is.

    Raises:
        OSError: if it cannot be written; it names the file, which is the old one then.
    """
    # Nobody can guess the name and put a link there.
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
    """Wait until the names in a folder are on the disk; some file systems cannot, and need not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def hash_of(file: FileIO, progress: Progress | None = None) -> str:
    """Return the XXH3 hash of the rest of an open file, 128 bits in hexadecimal digits.

    Bytes that are exchanged, flipped or of another file change it; it is no protection against
    people.  It costs one read of the file, at the speed of the page cache or the disk, and up to
    `CHUNK_BYTES` of memory.
    """
    state = xxhash.xxh3_128()
    size_bytes = os.fstat(file.fileno()).st_size
    chunk = memoryview(bytearray(min(size_bytes + 1, CHUNK_BYTES)))
    while count := file.readinto(chunk):
        state.update(chunk[:count])
        if progress:
            progress(count)
    return state.hexdigest()


def hash_64(parts: "Iterable[Buffer]") -> int:
    """Return the XXH3 hash of bytes in memory, 64 bits as a number.

    Args:
        parts: what holds them, in order: contiguous objects with the buffer protocol.
    """
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


@contextmanager
def locked(folder: Path, name: str = ".zero8_lock") -> Iterator[None]:
    """Keep other processes from holding the lock of the same folder during the block.

    The lock goes with the process that holds it, however that ends; the file stays.  On a file
    system that has no locks the block runs without one.

    Raises:
        BlockingIOError: if another process holds it; the message says which.
        OSError: if the lock cannot be made, or something else has its name.
    """
    path = folder / name
    with lock_file(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = file.read(200).decode(errors="replace").strip()
            raise BlockingIOError(
                error.errno,
                "another job saves into this folder, or prunes it: "
                f"{holder or 'a process that has not said its name'} holds {path}; give each job "
                "a folder of its own",
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        with suppress(OSError):  # a full disk: the lock holds, it only does not say whose it is
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield


def lock_file(path: Path) -> FileIO:
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
