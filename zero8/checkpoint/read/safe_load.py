# SPDX-License-Identifier: Apache-2.0
"""Reads files of `torch.save`; no code in them runs (`zero8.checkpoint.read.inert`).

A small crafted file can still make torch allocate any memory, as DeepSpeed's and torch's own loads
of the same file would.
"""

import io
import os
import pickle
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from zero8.checkpoint.read.inert import Unpickler
from zero8.files.inside import opened_at


def load(path: Path, folder: Path | None = None) -> object:
    """Return the object that `torch.save` wrote to a file; tensors are mapped.

    Links are not followed below `folder`, a parent.  Damage raises ValueError with the file's name.
    """
    with opened_at(path, folder) as file, damage_in(path):
        if not zipfile.is_zipfile(file):
            raise ValueError("not a file of torch.save, or damaged; was it cut short?")
        # torch opens and maps files by name; this name is the open file's.
        own_name = f"/proc/self/fd/{file.fileno()}"
        size_bytes = os.fstat(file.fileno()).st_size
        return _loaded(own_name, torch.UntypedStorage.from_file(own_name, False, size_bytes))


def load_bytes(data: bytes) -> object:
    """Return the object that `torch.save` wrote, from its bytes; raises what torch does."""
    return _loaded(io.BytesIO(data), None)


def _loaded(file: str | io.BytesIO, mapped: torch.UntypedStorage | None) -> object:
    # torch.load would run code that is in a TorchScript archive.
    with torch.serialization._open_zipfile_reader(file) as archive:
        pickles = types.SimpleNamespace(Unpickler=Unpickler)
        return torch.serialization._load(
            archive, "cpu", pickles, overall_storage=mapped, encoding="utf-8"
        )


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
