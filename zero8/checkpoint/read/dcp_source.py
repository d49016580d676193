# SPDX-License-Identifier: Apache-2.0
"""Folders of `torch.distributed.checkpoint`: chunks of tensors, and a file of metadata.

Optimizer states are recognized by the keys that torch.distributed.checkpoint.state_dict makes,
flattened or not: `<prefix>state.<parameter>.<entry>`.  Weights of parameters with states that are
saved as the parts of torchao's classes are put together (`zero8.checkpoint.read.dcp_weights`).
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from zero8.algorithms.table import ALGORITHMS
from zero8.checkpoint.read.dcp_metadata import Chunk, Entry, Place, load_metadata
from zero8.checkpoint.read.dcp_weights import Int8Keys, int8_keys, key_of_values
from zero8.checkpoint.read.fragment import Fragment
from zero8.checkpoint.read.safe_load import damage_in, load
from zero8.checkpoint.read.source import Facts, Source, size_bytes_of_path
from zero8.checkpoint.read.states import fragment_of
from zero8.spec.grid import UNITS, is_narrow
from zero8.spec.int8_rows import decoded
from zero8.spec.shown import shown
from zero8.state.entries import CODES_ENDINGS, FIRST_ENTRIES, bits_at
from zero8.state.extent import Extent
from zero8.state.header import StateHeader
from zero8.state.table import Piece

METADATA = ".metadata"
_MODEL = "model."
"""The prefix of the keys of a model's tensors."""
_MOMENT = re.compile(rf"(?P<prefix>.*?)state\.(?P<name>.+)\.(?:{'|'.join(FIRST_ENTRIES)})")
_CODES = tuple(f".{entry}" for entry in FIRST_ENTRIES)
_OF_ALL = ("step", "format", *{entry.name for one in ALGORITHMS for entry in one.memory})
"""Entries of a state that are the same on all ranks."""
_MOMENTS = list(dict.fromkeys(name for one in ALGORITHMS for name in one.moment_names))
_ENTRIES = (
    *_OF_ALL,
    "param_correction",
    *(f"{name}{kind}" for name in _MOMENTS for kind in ("", *CODES_ENDINGS, "_scale")),
)


MOST_READS = 16
"""The limit on bytes read, in file sizes; commands read most bytes once or twice."""
MOST_GROUPS = 1000


class DcpSource(Source):
    """See `Source`."""

    def __init__(self, folder: Path):
        """Read the metadata of a folder."""
        self.path = folder
        metadata = load_metadata(folder / METADATA)
        self._entries, self._places = metadata.entries, metadata.places
        # Matching costs the square of a key's length, so keys with other endings are skipped.
        found = [_MOMENT.fullmatch(key) for key in self._entries if key.endswith(_CODES)]
        self._prefixes = {match["name"]: match["prefix"] for match in found if match}
        files = self._files_of(self._places)
        self._left_bytes = MOST_READS * sum(map(size_bytes_of_path, files))

    def facts(self) -> Facts:
        """See `Source`."""
        ranks = {re.match(r"__(\d+)_", file.name) for file in self._files_of(self._entries)}
        numbers = [int(match[1]) for match in ranks if match]
        return Facts("dcp", max(numbers) + 1 if numbers else None)

    def files(self) -> list[Path]:
        """See `Source`: the files with codes, or float32 moments."""
        return self._files_of(self._codes.values())

    def _fragments(self, file: Path) -> Iterator[Fragment]:
        """See `Source`."""
        for name, key, chunk in self._chunks.get(file, ()):
            with damage_in(file):
                fragment = self._fragment(name, key, chunk)
            yield fragment

    def groups(self) -> list[dict]:
        """See `Source`."""
        groups: dict[str, dict] = {}
        for key in self._entries:
            number, _, setting = key.partition("param_groups.")[2].rpartition(".")
            if number:
                groups.setdefault(number, {})[setting] = self._value(key)
        if all("params" in group for group in groups.values()):
            return [groups[number] for number in sorted(groups, key=_as_number)]
        # Flattened: each parameter's settings under its own name.
        made: list[dict] = []
        for name, settings in groups.items():
            like = next((g for g in made if {**g, "params": 0} == {**settings, "params": 0}), None)
            if len(made) > MOST_GROUPS:  # the time is quadratic in their number
                raise ValueError(f"{self.path}: got more than {MOST_GROUPS} parameter groups")
            if like is None:
                made.append({**settings, "params": []})
            (like or made[-1])["params"].append(name)
        for group in made:
            order = {name: at for at, name in enumerate(group.get("param_names") or [])}
            group["params"].sort(key=lambda name, order=order: order.get(name, len(order)))
        return made

    def tensors(self) -> dict[str, Callable[[], Tensor]]:
        """See `Source`."""
        int8 = {name: keys for name in self._prefixes if (keys := self._int8_keys(name))}
        parts = {key for keys in int8.values() for key in keys}
        name_of = {self._key_of_values(name): name for name in self._prefixes}
        found = {
            name_of.get(key, key.removeprefix(_MODEL)): partial(self._tensor, key)
            for key, entry in self._entries.items()
            if key.startswith(_MODEL) and entry.dtype is not None and key not in parts
        }
        return found | {name: partial(self._decoded, keys) for name, keys in int8.items()}

    def _int8_keys(self, name: str) -> Int8Keys | None:
        return int8_keys(self._entries, _MODEL + name)

    def _key_of_values(self, name: str) -> str:
        return key_of_values(self._entries, _MODEL + name)

    def _decoded(self, keys: Int8Keys) -> Tensor:
        """Return an INT8 weight in float32, joined from its chunks."""
        return decoded(self._tensor(keys.codes), self._tensor(keys.scales))

    def _tensor(self, key: str) -> Tensor:
        """Return a tensor, joined from its chunks."""
        entry = self._entries[key]
        whole = torch.empty(entry.size, dtype=entry.dtype)
        for chunk in entry.chunks:  # they cover it, as `load_metadata` has checked
            box = zip(chunk.offsets, chunk.sizes, strict=True)
            values = self._value(key, chunk.offsets)
            whole[tuple(slice(at, at + size) for at, size in box)] = values
        return whole

    @cached_property
    def _codes(self) -> dict[str, str]:
        """By parameter, the key of its codes, or else of its float32 moments."""
        keys = {}
        for name, prefix in self._prefixes.items():
            options = (f"{prefix}state.{name}.{entry}" for entry in FIRST_ENTRIES)
            keys[name] = next(key for key in options if key in self._entries)
        return keys

    @cached_property
    def _chunks(self) -> dict[Path, list[tuple[str, str, Chunk]]]:
        """By file, the chunks of `_codes` in it: name, key, chunk."""
        found: dict[Path, list[tuple[str, str, Chunk]]] = {}
        for name, key in self._codes.items():
            for chunk in self._entries[key].chunks:
                file = self.path / self._place(key, chunk.offsets).file
                found.setdefault(file, []).append((name, key, chunk))
        return found

    def _fragment(self, name: str, key: str, chunk: Chunk) -> Fragment:
        """Return the fragment of a chunk of the codes, or of the float32 moments, at `key`."""
        prefix = key.removesuffix(key.rpartition(".")[2])
        there = [entry for entry in _ENTRIES if prefix + entry in self._entries]
        entries = {e: self._value(prefix + e) for e in there if e in _OF_ALL}
        extent = _extent_of(entries, name, key, self._entries[key].size, chunk)
        piece = StateHeader.of(entries, name).piece(name) if "format" in entries else None
        for entry in there:
            if entry not in _OF_ALL:
                at = _offset_in(entry, piece, extent)
                entries[entry] = self._value(prefix + entry, at)
        file = self.path / self._place(key, chunk.offsets).file
        return fragment_of(file, name, entries, extent, self._weights(name, extent))

    def _weights(self, name: str, extent: Extent) -> Tensor | None:
        """Return the parameter's elements, None if they are not saved, or in other chunks."""
        if keys := self._int8_keys(name):
            codes = self._chunk(keys.codes, extent.offset)
            scales = self._chunk(keys.scales, extent.offset[:1])
            if codes is None or scales is None or len(codes) != len(scales):
                return None
            return decoded(codes, scales)
        return self._chunk(self._key_of_values(name), extent.offset)

    def _chunk(self, key: str, offset: tuple[int, ...]) -> Tensor | None:
        """Return the chunk of a tensor at an offset, None if no chunk begins there."""
        return self._value(key, offset) if offset in self._places.get(key, {}) else None

    def _value(self, key: str, offset: tuple[int, ...] | None = None) -> object:
        """Return the stored value of an entry, or its chunk at an offset."""
        place = self._place(key, offset)
        path = self.path / place.file
        found = load(path, self.path, place.offset, place.length)
        self._left_bytes -= place.length
        if self._left_bytes < 0:
            raise ValueError(f"{path}: damaged: got values that share bytes of the files")
        entry = self._entries.get(key, Entry())
        if not entry.chunks:
            return found
        at = self._chunk_offset(key, offset)
        sizes = entry.sizes_at.get(at)
        got = (tuple(found.shape), found.dtype) if isinstance(found, Tensor) else found
        if got != (sizes, entry.dtype):
            raise ValueError(
                f"{path}: got {shown(got) if got is found else got} for {key}, expected a tensor "
                f"of {sizes}, {entry.dtype}"
            )
        return found

    def _place(self, key: str, offset: tuple[int, ...] | None) -> Place:
        """Return the place of an entry, or of its chunk at an offset."""
        at = self._chunk_offset(key, offset)
        return self._places[key][at]

    def _chunk_offset(self, key: str, offset: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the offset in `_places` of a chunk, from its offset in the first dimensions."""
        places = self._places.get(key, {})
        # Without an offset there is one place; chunks are not cut in further dimensions.
        at = next(iter(places), ()) if offset is None else offset
        at += (0,) * (len(next(iter(places), ())) - len(at))
        if at not in places:
            raise ValueError(f"{self.path / METADATA}: got no place of {key} at {offset}")
        return at

    def _files_of(self, keys) -> list[Path]:
        places = (place for key in keys for place in self._places.get(key, {}).values())
        return sorted({self.path / place.file for place in places})


def _as_number(key: str) -> tuple[int, str]:
    return (int(key) if key.isdigit() else -1), key


def _extent_of(entries: dict, name: str, key: str, size: tuple[int, ...], chunk: Chunk) -> Extent:
    """Return the part of a parameter of which a chunk has the codes or the values.

    Args:
        entries: of its state, with its format.
        name: the parameter's.
        key: of the codes or values.
        size: the shape of all of them.
        chunk: the chunk.
    """
    bits = bits_at(key)
    if bits in (None, 8):
        return Extent(size, chunk.sizes, chunk.offsets)
    piece = StateHeader.of(entries, name).piece(name)
    if not piece.is_quantized or piece.grid.code_shape(piece.shape, bits) != tuple(size):
        raise ValueError(f"{key}: got shape {tuple(size)} for a parameter of shape {piece.shape}")
    kept = len(size) - 2
    in_row, numel = math.prod(piece.shape[kept + 1 :]), UNITS[bits].numel
    # A chunk begins in a row where a unit does; its last unit may have fewer codes.
    begin = chunk.offsets[kept] * numel // in_row
    end = min(-(-(chunk.offsets[kept] + chunk.sizes[kept]) * numel // in_row), piece.shape[kept])
    zeros = (0,) * (len(piece.shape) - kept - 1)
    return Extent(
        piece.shape,
        (*chunk.sizes[:kept], end - begin, *piece.shape[kept + 1 :]),
        (*chunk.offsets[:kept], begin, *zeros),
    )


def _offset_in(entry: str, piece: Piece | None, extent: Extent) -> tuple[int, ...]:
    """Return where the part of a parameter begins in an entry, in the entry's first dimensions.

    Args:
        entry: the key, of codes, scales or values.
        piece: the whole parameter, None if the state has no format.
        extent: the part.
    """
    bits, is_scale = bits_at(entry), entry.endswith("_scale")
    if not is_scale and bits in (None, 8):  # shaped as the parameter
        return extent.offset
    if piece is None:
        return ()
    if not piece.is_quantized or is_narrow(extent.shape):
        return extent.offset[:1]
    _, offset = extent.scale_box(piece) if bits is None else extent.code_box(piece, bits)
    return offset
