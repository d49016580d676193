# SPDX-License-Identifier: Apache-2.0
"""What the file `.metadata` of torch.distributed.checkpoint says: which tensors, in which chunks.

Read as plain data, and looked at before anything else is: chunks lie apart, inside their tensor,
and cover it.
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
"""Along how many dimensions a tensor may be cut; meshes of devices have fewer."""


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

    @cached_property
    def sizes_at(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The sizes of the chunks by their offsets."""
        return {chunk.offsets: chunk.sizes for chunk in self.chunks}


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
        raise ValueError(f"{shown(key)}: got chunks that overlap, or are not all of it")


def _corners(boxes: Iterable[Chunk], axes: list[int]) -> dict[tuple[int, ...], int]:
    """Return the corners of boxes with how often each is there, those of odd ends counted down.

    A box's indicator function is the sum over its 2^n corners c of (-1)^(ends in c) times the
    indicator of all points that are at least c in every coordinate.  These indicators are linearly
    independent, so boxes cover something exactly once if and only if its corners have these counts.
    It takes a time of 2^n for each box, however they lie.
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
        raise ValueError(f"got a file {shown(name)}, expected one in its folder")
    if not all(type(number) is int and 0 <= number < 2**62 for number in (offset, length)):
        raise ValueError(f"{name}: got a place from {shown(offset)}, of {shown(length)} bytes")
    if info.get("transform_descriptors"):
        raise ValueError(
            f"{name}: got a tensor that is compressed or encrypted, which zero8 does not read"
        )
    return Place(name, offset, length)
