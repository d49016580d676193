# SPDX-License-Identifier: Apache-2.0
"""Files that are there in whole or not at all, their hashes, and a lock that dies with its holder.

After a loss of power a file has its contents only if it was synced, and its name only if its folder
was.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

CHUNK_BYTES = 4 << 20
TEMPORARY = ".zero8-tmp"
"""The end of the name of a file that `write_atomically` has not finished."""

Progress = Callable[[int], object]
"""Called with the number of bytes read since the last call."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that at any time, even after a loss of power, it is the old or the new one.

    Two processes must not write the same path at once.

    Raises:
        OSError: if it cannot be written; it names the file, which is the old one then.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Wait until the contents of a file are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk; some file systems cannot, and need not."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


def hash_of(path: Path, progress: Progress | None = None) -> str:
    """Return the XXH3 hash of a file, 128 bits in hexadecimal digits.

    Bytes that are exchanged, flipped or of another file change it; it is no protection against
    people.  It costs one read of the file, at the speed of the page cache or the disk, and
    `CHUNK_BYTES` of memory.
    """
    state, chunk = xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            state.update(chunk[:count])
            if progress:
                progress(count)
    return state.hexdigest()


def hash_64(parts: Iterable) -> int:
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
    """
    path = folder / name
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read(200).strip() or "a process that has not said its name"
            raise BlockingIOError(
                error.errno,
                f"another job saves into this folder: {holder} holds {path}; give each job a "
                "folder of its own",
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        with suppress(OSError):  # a full disk: the lock holds, it only does not say whose it is
            os.truncate(path, 0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
