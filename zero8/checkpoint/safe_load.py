# SPDX-License-Identifier: Apache-2.0
"""Reads files of `torch.save` and metadata of `torch.distributed.checkpoint` without running code.

Classes and functions that a file names, and that torch does not count as safe, are not imported:
an `Inert` takes their place.  Tensors are mapped into memory, not read, so that nothing is
allocated from sizes that a file claims.
"""

import io
import pickle
import threading
import zipfile
from pathlib import Path

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zero8.zero.moment_tensor import rebuild_moment

_LOCK = threading.Lock()
_OURS = "zero8.zero.moment_tensor.rebuild_moment"


class Inert:
    """Stands for an object of a class that is not needed to read states; does nothing.

    Attributes:
        args: what it would have been made of.
    """

    def __init__(self, *args):
        """Remember the arguments."""
        self.args = args


def load(path: Path) -> object:
    """Return what `torch.save` wrote to a file, tensors mapped into memory.

    Raises:
        ValueError: if it is damaged, or not such a file.
        OSError: if it cannot be opened.
    """
    with open(path, "rb") as file:
        _check_stored(path, file)
    return _loaded(path, path, mmap=True)


def load_bytes(data: bytes, path: Path) -> object:
    """Return what `torch.save` wrote, as `load` does; `path` is where the bytes are from."""
    file = io.BytesIO(data)
    _check_stored(path, file)
    return _loaded(file, path, mmap=False)


def _check_stored(path: Path, file) -> None:
    """Raise ValueError unless a file is a zip that would not grow when it is read."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a file of torch.save, or damaged: {error}") from error
    file.seek(0, io.SEEK_END)
    if any(e.compress_type != zipfile.ZIP_STORED for e in entries) or (
        sum(e.file_size for e in entries) > file.tell()
    ):
        raise ValueError(f"{path}: got compressed entries, which torch.save does not write")
    file.seek(0)


def _loaded(file, path: Path, mmap: bool) -> object:
    with _LOCK:  # what is safe holds for the whole process
        return _loaded_alone(file, path, mmap)


def _loaded_alone(file, path: Path, mmap: bool) -> object:
    try:
        unknown = set(get_unsafe_globals_in_checkpoint(file)) - {_OURS}
        inert = [(Inert, name) for name in unknown]
        with safe_globals([(rebuild_moment, _OURS), *inert]):
            if not mmap:
                file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # whatever a damaged file makes torch raise
        raise ValueError(f"{path}: damaged, or not readable: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the line of torch's long messages that says what is wrong."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in lines if "WeightsUnpickler error" in line), lines[0]).strip()


_DCP = "torch.distributed.checkpoint"
_METADATA_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = {
    *((f"{_DCP}.metadata", name) for name in _METADATA_CLASSES),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    *((f"pathlib{module}", "PosixPath") for module in ("", "._local")),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _Metadata(pickle.Unpickler):
    """Finds nothing but what the metadata of torch.distributed.checkpoint are made of."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which metadata never do")


def load_metadata(path: Path) -> object:
    """Return the `Metadata` of a folder of torch.distributed.checkpoint, its file `.metadata`.

    Raises:
        ValueError: if the file is damaged, or is something else.
        OSError: if it cannot be opened.
    """
    # torch loads the classes only with this module.
    from torch.distributed.checkpoint.metadata import Metadata

    data = path.read_bytes()
    try:
        metadata = _Metadata(io.BytesIO(data)).load()
    except Exception as error:  # whatever a damaged file makes pickle raise
        raise ValueError(f"{path}: damaged, or not readable: {_reason(error)}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path}: not the metadata of torch.distributed.checkpoint")
    return metadata
