# SPDX-License-Identifier: Apache-2.0
"""Reads files of `torch.save` without running code, or allocating by the numbers in them.

Files are mapped into memory, and tensors are views of them.  For why not torch's reader, see
`zero8.checkpoint.read.safe_pickle`.
"""

import io
import math
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zero8.checkpoint.files.mapped_file import mapped
from zero8.checkpoint.read.safe_pickle import Inert, SafePickle
from zero8.spec.grid import MAX_DIMS, MAX_NUMEL

MAX_PICKLE_BYTES = 1 << 30
"""The longest pickle that is read into memory; sparse files can have any size."""
_MAX_KEY_CHARACTERS = 64
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_DTYPES = {
    f"torch.{kind}Storage": dtype
    for kind, dtype in {
        "Float": torch.float32,
        "BFloat16": torch.bfloat16,
        "Half": torch.float16,
        "Double": torch.float64,
        "Byte": torch.uint8,
        "Char": torch.int8,
        "Short": torch.int16,
        "Int": torch.int32,
        "Long": torch.int64,
        "Bool": torch.bool,
    }.items()
} | {"torch.storage.UntypedStorage": torch.uint8, "torch.UntypedStorage": torch.uint8}


def load(
    path: Path, folder: Path | None = None, begin: int = 0, num_bytes: int | None = None
) -> object:
    """Return the object that `torch.save` wrote to a file, or to a range of it; tensors are mapped.

    Args:
        path: the file.
        folder: a parent of it; links below it are not followed.
        begin: the first byte.
        num_bytes: number of bytes; None for all that follow.

    Raises:
        ValueError: naming the file, if it is damaged, or not such a file.
        OSError: if it cannot be opened.
    """
    whole = mapped(path, folder)
    end = len(whole) if num_bytes is None else begin + num_bytes
    if not 0 <= begin <= end <= len(whole):
        raise ValueError(f"{path}: got {len(whole)} bytes, expected some from {begin} to {end}")
    with damage_in(path):
        return _Archive(whole[begin:end]).content()


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


class _Storage(NamedTuple):
    dtype: torch.dtype
    bytes: torch.UntypedStorage


class _Archive:
    """A zip of torch.save: `<folder>/data.pkl` and the records `<folder>/data/<key>`."""

    def __init__(self, data: Tensor):
        """Parse the directory of a zip in (bytes,) uint8."""
        self._data = data
        self._storages: dict[str, torch.UntypedStorage] = {}
        try:
            with zipfile.ZipFile(io.BufferedReader(_File(data))) as archive:
                entries = archive.infolist()
        except Exception as error:  # zipfile may raise anything for a damaged file
            raise ValueError(f"not a file of torch.save, or damaged: {error}") from error
        self._places = self._checked(entries)
        pickles = [name for name in self._places if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"got {len(pickles)} records data.pkl, expected one, of torch.save")
        self._folder = pickles[0].removesuffix("data.pkl")

    def content(self) -> object:
        """Return the saved object."""
        order = self._places.get(self._folder + "byteorder")
        if order and self._read(order) != sys.byteorder.encode():
            raise ValueError(f"got numbers that are not {sys.byteorder}-endian")
        place = self._places[self._folder + "data.pkl"]
        data = self._read(place)
        if place.crc not in (0, zlib.crc32(data)):  # 0 if torch wrote none
            raise ValueError("damaged: the checksum of data.pkl is wrong")
        return SafePickle(data, _MAKERS, self._storage).load()

    def _checked(self, entries: list[zipfile.ZipInfo]) -> "dict[str, _Place]":
        """Return the places of the records; no two overlap, and torch would find the same ones.

        torch reads a file that does not begin as a zip as a pickle, and ignores the case of names.
        """
        places, end = {}, 0
        if bytes(self._data[:4]) != b"PK\3\4":
            raise ValueError("damaged: got other bytes before the zip")
        if len({entry.filename.lower() for entry in entries}) < len(entries):
            raise ValueError("damaged: got two entries of the zip with one name")
        for entry in sorted(entries, key=lambda entry: entry.header_offset):
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise ValueError("got compressed entries, which torch.save does not write")
            if entry.header_offset < end:
                raise ValueError("damaged: entries of the zip overlap")
            header = self._bytes(entry.header_offset, _LOCAL_HEADER.size)
            magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
            begin = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
            end = begin + entry.file_size
            if magic != b"PK\3\4" or end > len(self._data) or entry.filename in places:
                raise ValueError(f"damaged: entry {entry.filename!r} of the zip is missing")
            places[entry.filename] = _Place(begin, end, entry.CRC)
        return places

    def _read(self, place: "_Place") -> bytes:
        if place.end - place.begin > MAX_PICKLE_BYTES:
            raise ValueError(f"got a pickle of {place.end - place.begin} bytes")
        return self._bytes(place.begin, place.end - place.begin)

    def _bytes(self, begin: int, count: int) -> bytes:
        if begin < 0 or begin + count > len(self._data):
            raise ValueError(f"damaged: got {len(self._data)} bytes, expected {begin + count}")
        return self._data[begin : begin + count].numpy().tobytes()

    def _storage(self, pid: object) -> _Storage:
        """Return the storage of ("storage", class, key, device, number of elements)."""
        _, kind, key, _, numel = pid
        dtype = _DTYPES.get(kind.name) if isinstance(kind, Inert) else None
        is_key = isinstance(key, str) and len(key) <= _MAX_KEY_CHARACTERS
        place = self._places.get(f"{self._folder}data/{key}") if is_key else None
        if dtype is None or place is None:
            return Inert("storage", (kind,))
        held = place.end - place.begin
        if type(numel) is not int or not 0 <= numel * dtype.itemsize <= held:
            raise ValueError(f"damaged: got {held} bytes of tensor {key}, expected more")
        if key not in self._storages:  # tensors share it
            self._storages[key] = self._bytes_at(place)
        found, used_bytes = self._storages[key], numel * dtype.itemsize
        return _Storage(dtype, found if used_bytes == len(found) else found[:used_bytes])

    def _bytes_at(self, place: "_Place") -> torch.UntypedStorage:
        part = self._data[place.begin : place.end]
        if part.data_ptr() % 16:  # torch.save aligns records, but chunks of DCP begin anywhere
            part = part.clone()
        begin = part.storage_offset()
        return part.untyped_storage()[begin : begin + part.numel()]


class _Place(NamedTuple):
    begin: int
    end: int
    crc: int


class _File(io.RawIOBase):
    """Bytes as a readable file."""

    def __init__(self, data: Tensor):
        self._data, self._at = memoryview(data.numpy()), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        if base + offset < 0:
            raise ValueError(f"got {offset} to seek from {base}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def _tensor(storage, offset, size, stride, _requires_grad, _hooks, *_) -> Tensor | Inert:
    """Return a view of a storage; `Inert` for tensors that states never are."""
    if not isinstance(storage, _Storage):
        return Inert("torch.Tensor", ())
    held = len(storage.bytes) // storage.dtype.itemsize
    numbers = [offset, *size, *stride]
    if len(size) != len(stride) or len(size) > MAX_DIMS:
        raise ValueError(f"damaged: got a tensor of {len(size)} dimensions")
    if not all(type(number) is int and 0 <= number <= MAX_NUMEL for number in numbers):
        raise ValueError("damaged: got a tensor with an impossible size, stride or offset")
    numel = math.prod(size)
    end = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if numel and end > held:
        raise ValueError(f"damaged: got a tensor that ends at {end} in a storage of {held}")
    if numel > held:  # expanded: copying it could allocate any number of bytes
        return Inert("torch.Tensor.expand", ())
    if math.prod(max(n, 1) for n in size) > MAX_NUMEL:
        raise ValueError("damaged: got a tensor of impossible sizes")
    return torch.empty(0, dtype=storage.dtype).set_(storage.bytes, offset, size, stride)


def _tensor_of_bytes(storage, offset, size, stride, grad, hooks, dtype, *_) -> Tensor | Inert:
    """Return 8-bit floats as their bytes, uint8; `Inert` for other dtypes that torch saves so."""
    if not isinstance(dtype, Inert) or dtype.name != "torch.float8_e4m3fn":
        return Inert("torch.Tensor", ())
    return _tensor(storage, offset, size, stride, grad, hooks)


def _size(size=()) -> torch.Size:
    if len(size) > MAX_DIMS:
        raise ValueError(f"damaged: got a size of {len(size)} dimensions")
    return torch.Size(size)


def _ordered_dict(*items) -> OrderedDict:
    if items:
        raise ValueError("damaged: got a copy of a dict")  # repeated copies use any memory
    return OrderedDict()


_MAKERS = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_bytes,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch.Size": _size,
    "collections.OrderedDict": _ordered_dict,
}
