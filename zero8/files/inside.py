# SPDX-License-Identifier: Apache-2.0
"""Access to the files inside an untrusted folder.

A checkpoint can hold symbolic links that lead out of it, and pipes or devices whose readers block.
These functions follow no link below the folder, and open regular files only.  The folder's own path
is the caller's, and may contain links; paths in it have slashes and no "..".

What cannot be opened raises OSError; what is no regular file, or is reached through a link,
ValueError.
"""

import io
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path, PurePosixPath

from zero8.environment.host_memory import advise

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe would block.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC


def opened(folder: Path, path: str) -> FileIO:
    """Open a regular file to read its bytes, without a buffer."""
    with _parent_of(folder, path) as (parent, name):
        # Before the open, which can act on a device; and after it, as the file may be replaced.
        _check_is_file(os.lstat(name, dir_fd=parent), Path(folder, path))
        file = FileIO(os.open(name, _FILE, dir_fd=parent))
    try:
        _check_is_file(os.fstat(file.fileno()), Path(folder, path))
    except ValueError:
        file.close()
        raise
    return file


def opened_at(path: Path, folder: Path | None) -> FileIO:
    """Open a file in a folder; without one, its path may have links."""
    if folder is None:
        place = path.resolve()
        return opened(place.parent, place.name)
    return opened(folder, path.relative_to(folder).as_posix())


def release(*paths: Path) -> None:
    """Take mapped files at or in some paths out of this process's memory, which had pages of them.

    They are read again when they are used.  Nothing may have changed those that are mapped
    privately, as `torch.load` does, and no other thread may unmap any.
    """
    places = tuple(f"{path.resolve()}/" for path in paths)
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        if f"{name}/".startswith(places):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            advise(begin, end - begin, mmap.MADV_DONTNEED)


def remove(folder: Path, path: str) -> None:
    """Remove a file, or a link itself, if it exists."""
    with suppress(FileNotFoundError), _parent_of(folder, path) as (parent, name):
        os.unlink(name, dir_fd=parent)


def read_at_most(folder: Path, path: str, limit_bytes: int) -> bytes:
    """Return the contents of a file; a longer one raises ValueError."""
    with io.BufferedReader(opened(folder, path)) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise ValueError(f"got more than {limit_bytes} bytes")
    return data


def paths_of(folder: Path) -> Iterator[str]:
    """Yield the paths, relative and with slashes, of everything in a folder except folders.

    Links to folders are included, and not followed.
    """
    pending = [""]
    while pending:
        inner = pending.pop()
        with os.scandir(Path(folder, inner)) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        folders = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        pending += [f"{inner}{name}/" for name in reversed(folders)]
        yield from (f"{inner}{e.name}" for e in found if not e.is_dir(follow_symlinks=False))


def leads_out(path: str) -> bool:
    """Return whether a path is empty, absolute, or may lead out of the folder it is relative to."""
    parts = PurePosixPath(path).parts
    return not parts or parts[0] == "/" or ".." in parts or "\0" in path


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder, and not a link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


@contextmanager
def _parent_of(folder: Path, path: str) -> Iterator[tuple[int, str]]:
    """Open the folder that a path is in; yield its descriptor and the last part of the path."""
    *parents, name = PurePosixPath(path).parts
    descriptor = None
    try:
        descriptor = os.open(folder, _FOLDER)
        for depth, parent in enumerate(parents, 1):
            if stat.S_ISLNK(os.lstat(parent, dir_fd=descriptor).st_mode):
                raise ValueError(_not_itself(Path(folder, *parents[:depth])))
            inner = os.open(parent, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor, name
    except OSError as error:  # it names only the last part of the path
        raise OSError(error.errno, error.strerror, str(Path(folder, path))) from error
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _check_is_file(info: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise ValueError(_not_itself(path))


def _not_itself(path: Path) -> str:
    return (
        f"{path}: got a folder, a symbolic link, a pipe or a device, expected a file in a folder "
        "of the checkpoint itself"
    )
