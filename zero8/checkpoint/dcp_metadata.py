# SPDX-License-Identifier: Apache-2.0
"""What the file `.metadata` of torch.distributed.checkpoint says: which tensors, in which chunks.

Read as plain data, and looked at before anything else is: chunks lie apart, inside their tensor,
and cover it, and so do the places in files that they are said to be at.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from zero8.checkpoint.safe_load import damage_in
from zero8.checkpoint.safe_pickle import Inert, SafePickle
from zero8.spec.grid import MAX_DIMS, MAX_NUMEL
from zero8.spec.shown import shown
from zero8.state.mapped_file import mapped

_MODULE = "torch.distributed.checkpoint.metadata"
MAX_KEY_CHARACTERS = 4096


class Chunk(NamedTuple):
    """A box of a tensor, as long as its sizes in each dimension, from its offsets on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Place(NamedTuple):
    """Bytes of a file in the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A tensor in chunks, or something else, without any.

    Attributes:
        size: the tensor's shape.
        dtype: the tensor's, None if it is of a kind that states are not.
        chunks: its parts.
    """

    size: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True)
class Metadata:
    """What is in a folder.

    Attributes:
        entries: by key.
        places: by key, and there by the offset of the chunk, () for what is in one piece.
    """

    entries: dict[str, Entry]
    places: dict[str, dict[tuple[int, ...], Place]]


def load_metadata(path: Path) -> Metadata:
    """Return the metadata of a folder of torch.distributed.checkpoint, its file `.metadata`.

    Raises:
        ValueError: naming the file, if it is damaged, or is something else.
        OSError: if it cannot be opened.
    """
    data = mapped(path).numpy().tobytes()
    with damage_in(path):
        found = SafePickle(data, _MAKERS, _no_storage).load()
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
                raise ValueError(f"{at['fqn']}: got two places of what is at {offset}")
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
    """Return what an object of a class of torch's has been made of."""
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
        raise ValueError(f"{shown(key)}: got sizes or offsets of a chunk that cannot be")
    return tuple(sizes)


def _entry(key: str, found: object) -> Entry:
    if isinstance(found, Inert) and found.name == f"{_MODULE}.BytesStorageMetadata":
        return Entry()
    saved = _attributes(found, f"{_MODULE}.TensorStorageMetadata")
    size = _sizes(saved["size"], key)
    if not isinstance(saved["chunks"], list):
        raise ValueError(f"{shown(key)}: got chunks that are no list")
    if len(set(map(id, saved["chunks"]))) < len(saved["chunks"]):
        raise ValueError(f"{shown(key)}: got a chunk twice")
    found = (_attributes(chunk, f"{_MODULE}.ChunkStorageMetadata") for chunk in saved["chunks"])
    chunks = tuple(Chunk(_sizes(c["offsets"], key), _sizes(c["sizes"], key)) for c in found)
    _check_cover(key, size, chunks)
    return Entry(size, _dtype(saved.get("properties")), chunks)


def _dtype(properties: object) -> torch.dtype | None:
    """Return the dtype that properties begin with, where it is one that this torch has."""
    state = properties.state if isinstance(properties, Inert) else None
    name = getattr(state[0], "name", "") if isinstance(state, tuple) and state else ""
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    return dtype if isinstance(dtype, torch.dtype) else None


def _check_cover(key: str, size: tuple[int, ...], chunks: tuple[Chunk, ...]) -> None:
    """Raise ValueError unless chunks are in the tensor, apart from each other, and are all of it.

    Those with elements are; a rank that has none may have an empty chunk anywhere.
    """
    whole = math.prod(size)
    boxes = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    for offsets, sizes in boxes:
        reaches = zip(offsets, sizes, size, strict=True)
        if len(sizes) != len(offsets) or any(at + n > end for at, n, end in reaches):
            raise ValueError(f"{shown(key)}: got a chunk at {offsets} that is not inside {size}")
    if sum(math.prod(chunk.sizes) for chunk in boxes) != whole or any(_overlapping(boxes)):
        raise ValueError(f"{shown(key)}: got chunks that overlap, or are not all of it")


def _overlapping(boxes: list[Chunk]) -> Iterator[bool]:
    """Yield whether two boxes overlap, of all pairs that may."""
    # Along the dimension that is cut most, so that few boxes are beside each other.
    cuts = [len(set(offsets)) for offsets in zip(*(box.offsets for box in boxes), strict=True)]
    if not cuts:  # numbers, of which each is all of it
        return
    axis = cuts.index(max(cuts))
    active: list[Chunk] = []
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        begin = box.offsets[axis]
        active = [one for one in active if one.offsets[axis] + one.sizes[axis] > begin]
        yield from (_meet(box, other) for other in active)
        active.append(box)


def _meet(box: Chunk, other: Chunk) -> bool:
    pairs = zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in pairs)


def _place(found: object) -> Place:
    info = _attributes(found, "torch.distributed.checkpoint.filesystem._StorageInfo")
    name, offset, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    is_name = isinstance(name, str) and len(name) <= 255 and name not in ("", ".", "..")
    if not is_name or Path(name).name != name or "\0" in name:
        raise ValueError(f"got a file {shown(name)}, expected one in its folder")
    if not all(type(number) is int and 0 <= number < 2**62 for number in (offset, length)):
        raise ValueError(f"{name}: got a place from {shown(offset)}, of {shown(length)} bytes")
    if info.get("transform_descriptors"):
        raise ValueError(
            f"{name}: got a tensor that is compressed or encrypted, which zero8 does not read"
        )
    return Place(name, offset, length)
