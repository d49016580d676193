# SPDX-License-Identifier: Apache-2.0
"""Folders of `torch.distributed.checkpoint`: chunks of tensors, and a file `.metadata` of places.

torch unpickles that freely.  Here nothing but the classes of such files is made.

Optimizer states are recognized by the keys that torch.distributed.checkpoint.state_dict makes,
flattened or not: `<prefix>state.<parameter>.<entry>`.  Weights of parameters with states that are
saved as the parts of torchao's classes are put together (`zero8.checkpoint.read.torchao_weights`).
"""

import io
import math
import os
import pickle
import re
from functools import cached_property, partial
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from zero8.checkpoint.read.fragment import Fragment, fragment_of
from zero8.checkpoint.read.safe_load import damage_in, load_bytes
from zero8.checkpoint.read.source import Source
from zero8.checkpoint.read.torchao_weights import PARTS, weight_of
from zero8.files.inside import opened, opened_at
from zero8.spec.shown import shown
from zero8.state.entries import ENTRIES, FIRST_ENTRIES

_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    *(
        f"{_DCP}.metadata.{name}"
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    f"{_DCP}.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
}

METADATA = ".metadata"
_MODEL = "model."
"""The prefix of the keys of a model's tensors."""
_MOMENT = re.compile(rf".*?state\.(.+)\.(?:{'|'.join(FIRST_ENTRIES)})")


def read_dcp(path: Path) -> Source:
    """Return the checkpoint in a folder, whose metadata is read at once."""
    folder = _Folder(path)
    places = folder.places
    keys = set(folder.moments.values())
    files = {path / info.relative_path for at, info in places.items() if at.fqn in keys}
    names = {re.match(r"__(\d+)_", info.relative_path) for info in places.values()}
    ranks = [int(match[1]) for match in names if match]
    return Source(
        kind="dcp",
        path=path,
        files=sorted(files),
        names=list(folder.moments),
        fragments=folder.fragments,
        groups=folder.groups,
        tensors={name: partial(folder.weights, name) for name in folder.model},
        world_size=max(ranks) + 1 if ranks else None,
    )


class _Folder:
    """A folder whose tensors are read on demand."""

    def __init__(self, path: Path):
        self.path = path
        metadata = load_metadata(path / METADATA)
        self.entries, self.places = metadata.state_dict_metadata, metadata.storage_data
        found = [match for key in self.entries if (match := _MOMENT.fullmatch(key))]
        self.moments = {match[1]: match[0] for match in found}

    def fragments(self, name: str) -> list[Fragment]:
        key = self.moments[name]
        prefix, file = f"{key.rpartition('.')[0]}.", self._file_of(key)
        with damage_in(file):
            there = [entry for entry in sorted(ENTRIES) if prefix + entry in self.entries]
            state = {entry: self._value(prefix + entry) for entry in there}
            weights = self.weights(name) if name in self.model else None
            return [fragment_of(file, name, state, weights)]

    def groups(self) -> list[dict]:
        groups: dict[str, dict] = {}
        for key in self.entries:
            number, _, setting = key.partition("param_groups.")[2].rpartition(".")
            if number:
                with damage_in(self.path / METADATA):
                    groups.setdefault(number, {})[setting] = self._value(key)
        if all("params" in group for group in groups.values()):
            return [groups[number] for number in sorted(groups, key=_as_number)]
        # Flattened: each parameter's settings under its own name.
        made: list[dict] = []
        for name, settings in groups.items():
            like = next((g for g in made if {**g, "params": 0} == {**settings, "params": 0}), None)
            if like is None:
                made.append({**settings, "params": []})
            (like or made[-1])["params"].append(name)
        for group in made:
            order = {name: at for at, name in enumerate(group.get("param_names") or [])}
            group["params"].sort(key=lambda name, order=order: order.get(name, len(order)))
        return made

    @cached_property
    def model(self) -> dict[str, dict[str, str]]:
        """By name, the keys of a tensor of the model, by its parts; that of a plain one is ""."""
        found: dict[str, dict[str, str]] = {}
        for key, entry in self.entries.items():
            if not isinstance(entry, TensorStorageMetadata) or not key.startswith(_MODEL):
                continue
            name, part = key.removeprefix(_MODEL), ""
            owner, _, end = name.rpartition(".")
            # Only of parameters with states: others may have such names.
            if end in PARTS and owner in self.moments and _MODEL + owner not in self.entries:
                name, part = owner, end
            found.setdefault(name, {})[part] = key
        return found

    def weights(self, name: str) -> Tensor:
        """Return the saved values of a parameter, or another tensor of the model."""
        keys = self.model[name]
        if "" in keys:
            return self._value(keys[""])
        return weight_of(name, {part: self._value(key) for part, key in keys.items()})

    def _value(self, key: str):
        """Return the value of an entry; tensors are joined from their chunks."""
        entry = self.entries[key]
        if isinstance(entry, BytesStorageMetadata):
            return self._read(MetadataIndex(key))
        full = [chunk for chunk in entry.chunks if math.prod(chunk.sizes)]
        parts = {chunk.offsets: self._chunk(key, chunk) for chunk in full}
        if len(parts) == 1 and (whole := parts.popitem()[1]).shape == entry.size:
            return whole
        whole = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        seen = torch.zeros(entry.size, dtype=torch.bool, device="cpu")
        for offsets, values in parts.items():
            sides = zip(offsets, values.shape, strict=True)
            box = tuple(slice(at, at + size) for at, size in sides)
            whole[box], seen[box] = values, True
        if not seen.all() or sum(values.numel() for values in parts.values()) > whole.numel():
            raise ValueError(f"{shown(key)}: got chunks that overlap, or do not cover the tensor")
        return whole

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        values = self._read(MetadataIndex(key, chunk.offsets))
        got = (values.shape, values.dtype) if isinstance(values, Tensor) else shown(values)
        expected = chunk.sizes, self.entries[key].properties.dtype
        if got != expected:
            raise ValueError(f"{shown(key)}: got a chunk {got}, expected {expected}")
        return values

    def _read(self, index: MetadataIndex) -> object:
        """Return what is stored at a place."""
        if index not in self.places:
            raise ValueError(f"{shown(index.fqn)}: got a chunk without a place in a file")
        info = self.places[index]
        begin, end = info.offset, info.offset + info.length
        file = io.BufferedReader(opened(self.path, info.relative_path))
        # Without a buffer, Linux reads 2 GiB at most.
        with file, damage_in(self.path / info.relative_path):
            held = os.fstat(file.fileno()).st_size
            if not 0 <= begin <= end <= held:
                raise ValueError(f"got {held} bytes, expected some from {begin} to {end}")
            file.seek(begin)
            return load_bytes(file.read(info.length))

    def _file_of(self, key: str) -> Path:
        """Return the file of an entry's first chunk."""
        with damage_in(self.path / METADATA):
            index = MetadataIndex(key, self.entries[key].chunks[0].offsets)
            return self.path / self.places[index].relative_path


def _as_number(key: str) -> tuple[int, str]:
    return (int(key) if key.isdigit() else -1), key


# --- The metadata -------------------------------------------------------------------------------


class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> object:
        full = f"{module}.{name}"
        if full == "builtins.getattr":  # by which Python 3.11.0 to 3.11.3 pickle members of enums
            return lambda owner, member: owner.__members__[member]
        if (module.partition(".")[0], name) == ("pathlib", "PosixPath"):
            return PurePosixPath
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if full not in _CLASSES and not is_dtype:
            raise pickle.UnpicklingError(f"got {shown(full)}, which such files do not hold")
        return super().find_class(module, name)

    def _build(self) -> None:
        if callable(self.stack[-2]):
            raise pickle.UnpicklingError("it sets attributes of a class or function")
        self.load_build()

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}


def load_metadata(path: Path) -> Metadata:
    """Return the contents of a file `.metadata`, whose places are in files beside it."""
    with io.BufferedReader(opened_at(path, path.parent)) as file, damage_in(path):
        found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise ValueError(f"not metadata of {_DCP}: got {shown(found)}")
        for key in found.state_dict_metadata:
            if not isinstance(key, str):
                raise ValueError(f"got a key {shown(key)}, expected a string")
        for info in found.storage_data.values():
            name = info.relative_path
            if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
                raise ValueError(f"got a file {shown(name)}, expected a name in the same folder")
            if getattr(info, "transform_descriptors", None):
                raise ValueError(
                    f"{name}: got a tensor that is compressed or encrypted, which zero8 does not "
                    "read"
                )
        return found
