# SPDX-License-Identifier: Apache-2.0
"""The file `.metadata` of torch.distributed.checkpoint: which tensors, in which chunks.

It is untrusted: its pickle is read without execution, and chunks must tile their tensor.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from zero8.checkpoint.files.mapped_file import mapped
from zero8.checkpoint.read.safe_load import MAX_PICKLE_BYTES, damage_in
from zero8.checkpoint.read.safe_pickle import Inert, SafePickle
from zero8.spec.grid import MAX_DIMS, MAX_NUMEL
from zero8.spec.shown import shown

_MODULE = "torch.distributed.checkpoint.metadata"
MAX_KEY_CHARACTERS = 4096
MAX_CUT_DIMS = 6
"""The most dimensions that a tensor may be cut along; device meshes have fewer."""


class Chunk(NamedTuple):
    """A box of a tensor: its offsets and sizes in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Place(NamedTuple):
    """Bytes of a file in the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A tensor in chunks, or another object, without chunks.

    Attributes:
        size: the tensor's shape.
        dtype: the tensor's dtype, None if unknown.
        chunks: its parts.
    """

    size: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    chunks: tuple[Chunk, ...] = ()

    @cached_property
    def sizes_at(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The sizes of the chunks by their offsets."""
        return {chunk.offsets: chunk.sizes for chunk in self.chunks}


@dataclass(frozen=True)
class Metadata:
    """The contents of a folder.

    Attributes:
        entries: by key.
        places: by key, and then by the offset of the chunk, () for objects without chunks.
    """

    entries: dict[str, Entry]
    places: dict[str, dict[tuple[int, ...], Place]]


def load_metadata(path: Path) -> Metadata:
    """Return the metadata in a file `.metadata`.

    Raises:
        ValueError: naming the file, if it is damaged, or not such a file.
        OSError: if it cannot be opened.
    """
    data = mapped(path, path.parent)
    with damage_in(path):
        if len(data) > MAX_PICKLE_BYTES:
            raise ValueError(f"got a pickle of {len(data)} bytes")
        found = SafePickle(data.numpy().tobytes(), _MAKERS, _no_storage).load()
        saved = _attributes(found, f"{_MODULE}.Metadata")
        entries = {
            _key(key): _entry(key, entry) for key, entry in saved["state_dict_metadata"].items()
        }
        places: dict[str, dict] = {}
        for index, info in (saved["storage_data"] or {}).items():
            at = _attributes(index, f"{_MODULE}.MetadataIndex")
            offset = () if at.get("offset") is None else _sizes(at["offset"], at["fqn"])
            of_key = places.setdefault(_key(at["fqn"]), {})
            if offset in of_key:
                raise ValueError(f"{at['fqn']}: got two places of the chunk at {offset}")
            of_key[offset] = _place(info)
        for key, entry in entries.items():
            there = places.get(key, {})
            if any(math.prod(chunk.sizes) and chunk.offsets not in there for chunk in entry.chunks):
                raise ValueError(f"{shown(key)}: got a chunk without a place in a file")
        return Metadata(entries, places)


def _no_storage(pid: object) -> Inert:
    return Inert("storage", ())


_MAKERS = {"torch.Size": lambda size=(): size}


def _attributes(found: object, name: str) -> dict:
    """Return the attributes of an unpickled object of this class; raises ValueError for others."""
    if not (isinstance(found, Inert) and found.name == name and isinstance(found.state, dict)):
        raise ValueError(f"not metadata of torch.distributed.checkpoint: got {shown(found)}")
    return found.state


def _key(key: object) -> str:
    if not isinstance(key, str) or len(key) > MAX_KEY_CHARACTERS:
        raise ValueError(f"got {shown(key)}, expected a key of at most {MAX_KEY_CHARACTERS}")
    return key


def _sizes(sizes: object, key: str) -> tuple[int, ...]:
    is_row = isinstance(sizes, tuple | list) and len(sizes) <= MAX_DIMS
    if not is_row or not all(type(n) is int and 0 <= n <= MAX_NUMEL for n in sizes):
        raise ValueError(f"{shown(key)}: got impossible sizes or offsets of a chunk")
    return tuple(sizes)


def _entry(key: str, found: object) -> Entry:
    if isinstance(found, Inert) and found.name == f"{_MODULE}.BytesStorageMetadata":
        return Entry()
    saved = _attributes(found, f"{_MODULE}.TensorStorageMetadata")
    size = _sizes(saved["size"], key)
    if not isinstance(saved["chunks"], list):
        raise ValueError(f"{shown(key)}: got chunks that are not a list")
    if len(set(map(id, saved["chunks"]))) < len(saved["chunks"]):
        raise ValueError(f"{shown(key)}: got a chunk twice")
    found = (_attributes(chunk, f"{_MODULE}.ChunkStorageMetadata") for chunk in saved["chunks"])
    chunks = tuple(Chunk(_sizes(c["offsets"], key), _sizes(c["sizes"], key)) for c in found)
    _check_cover(key, size, chunks)
    return Entry(size, _dtype(saved.get("properties")), chunks)


def _dtype(properties: object) -> torch.dtype | None:
    """Return the dtype in pickled `TensorProperties`, None if this torch lacks it."""
    state = properties.state if isinstance(properties, Inert) else None
    name = getattr(state[0], "name", "") if isinstance(state, tuple) and state else ""
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    return dtype if isinstance(dtype, torch.dtype) else None


def _check_cover(key: str, size: tuple[int, ...], chunks: tuple[Chunk, ...]) -> None:
    """Raise ValueError unless the chunks tile the tensor, apart from empty chunks anywhere."""
    boxes = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    for offsets, sizes in boxes:
        reaches = zip(offsets, sizes, size, strict=False)
        fits = len(offsets) == len(sizes) == len(size)
        if not fits or any(at + n > end for at, n, end in reaches):
            raise ValueError(f"{shown(key)}: got a chunk at {offsets} that is not inside {size}")
    cut = [axis for axis, n in enumerate(size) if any(box.sizes[axis] != n for box in boxes)]
    if len(cut) > MAX_CUT_DIMS:
        raise ValueError(
            f"{shown(key)}: got a tensor that is cut along {len(cut)} dimensions, expected at most "
            f"{MAX_CUT_DIMS}"
        )
    whole = [Chunk((0,) * len(size), size)] if math.prod(size) else []
    if _corners(boxes, cut) != _corners(whole, cut):
        raise ValueError(f"{shown(key)}: got chunks that overlap, or do not cover the tensor")


def _corners(boxes: Iterable[Chunk], axes: list[int]) -> dict[tuple[int, ...], int]:
    """Return the signed counts of the boxes' corners, without zeros.

    A box's indicator function is the sum over its 2^n corners c of (-1)^(ends in c) times the
    indicator of all points that are at least c in every coordinate.  These indicators are linearly
    independent, so boxes tile a whole if and only if their counts equal the whole's.  The time is
    2^n per box, however they lie.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in boxes:
        for ends in product((0, 1), repeat=len(axes)):
            corner = (offsets[a] + end * sizes[a] for a, end in zip(axes, ends, strict=True))
            counts[tuple(corner)] += (-1) ** sum(ends)
    return {corner: count for corner, count in counts.items() if count}


def _place(found: object) -> Place:
    info = _attributes(found, "torch.distributed.checkpoint.filesystem._StorageInfo")
    name, offset, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    is_name = isinstance(name, str) and len(name) <= 255 and name not in ("", ".", "..")
    if not is_name or Path(name).name != name or "\0" in name:
        raise ValueError(f"got a file {shown(name)}, expected a name in the same folder")
    if not all(type(number) is int and 0 <= number < 2**62 for number in (offset, length)):
        raise ValueError(f"{name}: got a place from {shown(offset)}, of {shown(length)} bytes")
    if info.get("transform_descriptors"):
        raise ValueError(
            f"{name}: got a tensor that is compressed or encrypted, which zero8 does not read"
        )
    return Place(name, offset, length)
