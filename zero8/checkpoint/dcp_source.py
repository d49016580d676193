# SPDX-License-Identifier: Apache-2.0
"""Folders of `torch.distributed.checkpoint`: tensors in chunks, and a file that says where.

State dicts of optimizers are found by their names: `<prefix>state.<parameter>.<entry>`, which is
what torch.distributed.checkpoint.state_dict makes, flattened or not.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from zero8.checkpoint.fragment import Fragment
from zero8.checkpoint.safe_load import load_bytes, load_metadata
from zero8.checkpoint.source import Facts, Source
from zero8.checkpoint.states import fragment_of
from zero8.spec.grid import is_narrow
from zero8.state.extent import Extent
from zero8.state.header import MOMENTS, Header

METADATA = ".metadata"
_MOMENT = re.compile(r"(?P<prefix>.*?)state\.(?P<name>.+)\.exp_avg(?:_q8)?")
_OF_ALL = ("step", "history", "format")
"""Entries of a state that are the same on all ranks."""
_ENTRIES = (
    *_OF_ALL,
    "param_correction",
    *(f"{which}{kind}" for which in MOMENTS for kind in ("", "_q8", "_scale")),
)


class DcpSource(Source):
    """See `Source`."""

    def __init__(self, folder: Path):
        """Look at a folder."""
        self.path = folder
        self._metadata = load_metadata(folder / METADATA)
        self._entries = self._metadata.state_dict_metadata
        found = [_MOMENT.fullmatch(key) for key in self._entries]
        self._prefixes = {match["name"]: match["prefix"] for match in found if match}

    def facts(self) -> Facts:
        """See `Source`."""
        ranks = {re.match(r"__(\d+)_", file.name) for file in self._files_of(self._entries)}
        numbers = [int(match[1]) for match in ranks if match]
        return Facts("dcp", max(numbers) + 1 if numbers else None)

    def files(self) -> list[Path]:
        """See `Source`: the files of codes, which those of scales are."""
        return self._files_of(self._codes.values())

    def fragments(self, file: Path) -> Iterator[Fragment]:
        """See `Source`."""
        for name, key in self._codes.items():
            for chunk in self._entries[key].chunks:
                if self._place(key, tuple(chunk.offsets))[0] == file:
                    yield self._fragment(name, key, chunk)

    def groups(self) -> list[dict]:
        """See `Source`."""
        groups: dict[str, dict] = {}
        for key in self._entries:
            number, _, setting = key.partition("param_groups.")[2].rpartition(".")
            if number:
                groups.setdefault(number, {})[setting] = self._value(key)
        flat = not all("params" in group for group in groups.values())
        if not flat:
            return list(groups.values())
        # Flattened: each parameter's settings under its own name.
        return [{**group, "params": [name]} for name, group in groups.items()]

    @cached_property
    def _codes(self) -> dict[str, str]:
        """By parameter, the key of what is cut as it is: codes, or float32 moments."""
        keys = {}
        for name, prefix in self._prefixes.items():
            options = (f"{prefix}state.{name}.{entry}" for entry in ("exp_avg_q8", "exp_avg"))
            keys[name] = next(key for key in options if key in self._entries)
        return keys

    def _fragment(self, name: str, key: str, chunk: ChunkStorageMetadata) -> Fragment:
        """Return what lies in a chunk of the codes, or of the float32 moments, called `key`."""
        extent = Extent(tuple(self._entries[key].size), tuple(chunk.sizes), tuple(chunk.offsets))
        prefix = key.removesuffix(key.rpartition(".")[2])
        there = [entry for entry in _ENTRIES if prefix + entry in self._entries]
        entries = {e: self._value(prefix + e) for e in there if e in _OF_ALL}
        scales_at = _offset_of_scales(entries, name, extent)
        for entry in there:
            if entry not in _OF_ALL:
                at = scales_at if entry.endswith("_scale") else extent.offset
                entries[entry] = self._value(prefix + entry, at)
        file, _, _ = self._place(key, extent.offset)
        return fragment_of(file, name, entries, extent, self._weights(name, extent))

    def _weights(self, name: str, extent: Extent) -> Tensor | None:
        """Return the parameter's elements, None if they are not saved, or cut otherwise."""
        key = f"model.{name}"
        places = self._places.get(key, {})
        return self._value(key, extent.offset) if extent.offset in places else None

    def _value(self, key: str, offset: tuple[int, ...] | None = None) -> object:
        """Return what is stored of an entry, a chunk of it if it has an offset."""
        path, begin, length = self._place(key, offset)
        with open(path, "rb") as file:
            file.seek(begin)
            return load_bytes(file.read(length), path)

    def _place(self, key: str, offset: tuple[int, ...] | None) -> tuple[Path, int, int]:
        """Return file, first byte and number of bytes of an entry, or of a chunk of it."""
        for at, info in self._places.get(key, {}).items():
            # What has no offset is one thing; what has more dimensions is whole in those.
            if offset is None or at == offset + (0,) * (len(at) - len(offset)):
                return self.path / info.relative_path, info.offset, info.length
        raise ValueError(f"{self.path / METADATA}: got no place of {key} at {offset}")

    @cached_property
    def _places(self) -> dict[str, dict]:
        places: dict[str, dict] = {}
        for index, info in self._metadata.storage_data.items():
            offset = () if index.offset is None else tuple(index.offset)
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(
                    f"{self.path / METADATA}: got a file {info.relative_path!r}, expected one in "
                    "its folder"
                )
            places.setdefault(index.fqn, {})[offset] = info
        return places

    def _files_of(self, keys) -> list[Path]:
        infos = (info for key in keys for info in self._places.get(key, {}).values())
        return sorted({self.path / info.relative_path for info in infos})


def _offset_of_scales(entries: dict, name: str, extent: Extent) -> tuple[int, ...]:
    """Return where the scales of a part of a parameter begin, in their first dimensions."""
    if "format" not in entries:
        return ()
    piece = Header.of(entries, name).piece(name)
    if not piece.is_quantized or is_narrow(extent.shape):
        return extent.offset[:1]
    _, offset = extent.scale_box(piece)
    return offset
