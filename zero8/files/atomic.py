# SPDX-License-Identifier: Apache-2.0
"""Atomic writes of files and folders.

After a loss of power a file has its contents only if it was synced, and its name only if its folder
was.
"""

import errno
import io
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

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


@contextmanager
def made_beside(target: Path) -> Iterator[Path]:
    """Yield a path for a file or a folder that is renamed to `target` at the end of the block.

    It lies in a temporary hidden folder beside `target`.  An error in the block leaves no target.
    Missing parents of the target are created.
    """
    _check_is_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        yield folder / target.name
        for path, _, _ in os.walk(folder / target.name):
            sync_folder(Path(path))
        _check_is_free(target)
        (folder / target.name).rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save(content: object, path: Path, after_write: Callable[[], None] = lambda: None) -> None:
    """Write a file by `torch.save`, and sync it to the disk; `after_write` follows each tensor."""
    with io.BufferedWriter(_Calling(path, "wb")) as file:
        file.raw.after_write = after_write
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


class _Calling(io.FileIO):
    after_write: Callable[[], None]

    def write(self, data: Any) -> int:
        num_bytes = super().write(data)
        self.after_write()
        return num_bytes


def _check_is_free(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target} exists; remove it or name another output")
