# SPDX-License-Identifier: Apache-2.0
"""Reads files of `torch.save` by torch's reader for `weights_only`, which runs no code in them.

Classes and functions that torch does not know are read as placeholders
(`zero8.checkpoint.read.inert`).  A small crafted file can still make torch allocate any memory, as
DeepSpeed's and torch's own loads of the same file would.
"""

import io
import os
import pickle
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from zero8.checkpoint.read.inert import allowed, settled
from zero8.files.inside import opened_at

_TABLE = threading.Lock()
"""torch's table of names that may be called is the process's, and commands read in threads."""


def load(path: Path, folder: Path | None = None) -> object:
    """Return the object that `torch.save` wrote to a file; tensors are mapped.

    Links are not followed below `folder`, a parent.  Damage raises ValueError with the file's name.
    """
    with opened_at(path, folder) as file, damage_in(path):
        if not os.fstat(file.fileno()).st_size:
            raise ValueError("got an empty file; was it cut short?")
        if not zipfile.is_zipfile(file):
            raise ValueError("not a file of torch.save, or damaged")
        # torch opens and maps files by name; this name is the open file's.
        own_name = f"/proc/self/fd/{file.fileno()}"
        return _loaded(own_name, mmap=True)


def load_bytes(data: bytes) -> object:
    """Return the object that `torch.save` wrote, from its bytes; raises what torch does."""
    return _loaded(io.BytesIO(data), mmap=False)


def _loaded(file: str | io.BytesIO, mmap: bool) -> object:
    with _TABLE, _only_torchs_own():
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        if isinstance(file, io.BytesIO):
            file.seek(0)
        with allowed(names):
            try:
                found = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
            except pickle.UnpicklingError as error:
                # torch adds the advice to run the code in the file; the reason is in its context.
                raise error.__context__ or error from None
    return settled(found)


@contextmanager
def _only_torchs_own() -> Iterator[None]:
    """Have torch know no other package's classes, which torchao adds when a script imports it."""
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(added)


@contextmanager
def damage_in(path: Path) -> Iterator[None]:
    """Turn all exceptions but OSError into ValueError with the file's name.

    Readers check their input; anything else that they raise is due to a damaged file.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        if isinstance(error, ValueError) and str(path) in message:
            raise
        what = "" if isinstance(error, ValueError) else f"damaged, or not readable: {_kind(error)}"
        raise ValueError(f"{path}: {what}{message}") from error


def _kind(error: Exception) -> str:
    return "" if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: "
