# SPDX-License-Identifier: Apache-2.0
"""The file that holds the optimizer state of one ZeRO-3 sub-group on a local disk.

    header         magic, checksum, format version, bytes of the description, step, the end of the
                   last tensor, the algorithm's memory (`zero8.state.memory`); HEADER_BYTES
    description    JSON: the moments, as in a saved `MomentTensor`, and the number of corrections;
                   at offset HEADER_BYTES
    tensors        codes, scales and float32 values of each moment, corrections of bfloat16 weights;
                   raw, each at a multiple of TENSOR_ALIGNMENT_BYTES

All numbers are little-endian.  Description bytes 0 mean "no state yet".  The checksum is the 64-bit
XXH3 of the whole file, with 0 in the checksum's place.  It detects writes that never happened
(DeepSpeed's aio does not report failed transfers) and misplaced ones.
"""

import itertools
import json
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zero8.deepspeed.moment_tensor import MomentTensor, moment_description, moments_in, store_like
from zero8.files.inside import mapped
from zero8.files.manifest import hash_64
from zero8.spec.algorithm import Algorithm
from zero8.spec.algorithms import algorithm_called
from zero8.spec.codec import Codec
from zero8.spec.shown import shown
from zero8.state.header import FORMAT_VERSION, check_version
from zero8.state.memory import checked_memory, counters
from zero8.state.plain import checked_step
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable

MAGIC = b"zero8swp"
HEADER = struct.Struct("<8sQIIqQ4d")
HEADER_BYTES = 512
_CHECKSUM = slice(8, 16)
TENSOR_ALIGNMENT_BYTES = 64
BLOCK_BYTES = 4096
"""Transfers that bypass the page cache are multiples of this."""


class SwapHeader(NamedTuple):
    """The header of a file, without the magic."""

    checksum: int
    description_bytes: int
    step: int
    end: int
    memory: tuple[float, ...]

    @classmethod
    def of(cls, data: Tensor) -> "SwapHeader":
        """Return the header of a file's bytes; raise ValueError if there is none."""
        begin = bytes(data[:HEADER_BYTES].numpy())
        if len(begin) < HEADER_BYTES or not begin.startswith(MAGIC):
            raise ValueError("not a file of 8-bit optimizer states, or damaged or cut short")
        _, checksum, version, *numbers = HEADER.unpack_from(begin)
        check_version("8-bit states", version)
        return cls(checksum, *numbers[:3], tuple(numbers[3:]))

    def packed(self) -> bytes:
        """Return the bytes of the header."""
        memory = self.memory + (0.0,) * (4 - len(self.memory))
        numbers = self.checksum, FORMAT_VERSION, *self[1:4]
        return HEADER.pack(MAGIC, *numbers, *memory).ljust(HEADER_BYTES, b"\0")


@dataclass(frozen=True)
class Layout:
    """The contents of a state's file, and their offsets."""

    algorithm: Algorithm
    codec: Codec  # of all moments
    table: PieceTable  # of all moments
    correction_numel: int  # of bfloat16 weights, one byte each

    @classmethod
    def of_state(cls, state: dict) -> "Layout":
        """Return the layout for a ZeRO partition's state."""
        store = next(iter(moments_in(state).values())).store
        correction = state.get("param_correction")
        numel = 0 if correction is None else correction.numel()
        return cls(algorithm_called(store.rule.algorithm), store.codec, store.table, numel)

    @classmethod
    def from_description(cls, text: bytes) -> "Layout":
        """Return the layout that a description describes; raise ValueError if it is damaged."""
        try:
            found = json.loads(text)
            first = store_like(found["moments"][0])
            algorithm = algorithm_called(first.rule.algorithm)
            layout = cls(algorithm, first.codec, first.table, found["correction_numel"])
            if layout.correction_numel not in (0, first.table.numel) or layout.description != text:
                raise ValueError(
                    f"got {shown(found)}, expected one codec and table for all moments"
                )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"its description is damaged, or of a later zero8: {error}") from error
        return layout

    @cached_property
    def like(self) -> tuple[MomentStore, ...]:
        """The moments, on the meta device."""
        rules = self.algorithm.moments
        return tuple(MomentStore.zeros(self.codec, rule, self.table, "meta") for rule in rules)

    @cached_property
    def description(self) -> bytes:
        """The JSON text that `from_description` reads."""
        moments = [moment_description(store) for store in self.like]
        parts = {"moments": moments, "correction_numel": self.correction_numel}
        return json.dumps(parts).encode()

    @cached_property
    def num_bytes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return (*[t.nbytes for store in self.like for t in store.buffers], self.correction_numel)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each tensor, and of the end of the last one."""
        ends = [aligned(n, TENSOR_ALIGNMENT_BYTES) for n in self.num_bytes]
        first = aligned(HEADER_BYTES + len(self.description), TENSOR_ALIGNMENT_BYTES)
        return tuple(itertools.accumulate(ends, initial=first))

    def file_bytes(self, alignment_bytes: int) -> int:
        """Return the size of the file, a multiple of the given alignment."""
        return aligned(self.offsets[-1], alignment_bytes)

    def state_in(self, buffer: Tensor, numbers: dict) -> dict:
        """Return the state with these numbers, whose tensors are views of a file's bytes."""
        sizes = zip(self.offsets, self.num_bytes, strict=False)
        views = iter([buffer[offset : offset + count] for offset, count in sizes])
        state = dict(numbers)
        for like in self.like:
            codes, scales, dense = next(views), next(views), next(views)
            scales = scales.view(torch.float32).view(like.scales.shape)
            buffers = codes, scales, dense.view(torch.float32)
            state[like.name] = MomentTensor(
                MomentStore(like.codec, like.rule, like.table, *buffers)
            )
        if self.correction_numel:
            state["param_correction"] = next(views).view(torch.int8)
        return state


def aligned(num_bytes: int, alignment_bytes: int) -> int:
    """Return the next multiple of an alignment."""
    return -(-num_bytes // alignment_bytes) * alignment_bytes


def pack(state: dict, layout: Layout, buffer: Tensor) -> SwapHeader:
    """Write the bytes of a file into a buffer, shape (file bytes,) uint8; return its header.

    Tensors that are already views of the buffer, as from `unpack`, are not copied.
    """
    step, *memory = (state[name] for name in counters(layout.algorithm))
    places = _tensors(layout.state_in(buffer, {}), layout)
    for target, source in zip(places, _tensors(state, layout), strict=True):
        if target.data_ptr() != source.data_ptr():
            target.copy_(source.view(target.shape))
    sizes = len(layout.description), int(step), layout.offsets[-1]
    header = SwapHeader(0, *sizes, tuple(map(float, memory)))
    _put(buffer, 0, header.packed() + layout.description)
    header = header._replace(checksum=checksum(buffer))
    _put(buffer, 0, header.packed())
    return header


def unpack(
    buffer: Tensor, path: str, known: Layout | None = None, expected: SwapHeader | None = None
) -> tuple[dict, Layout] | None:
    """Return a file's state, as views of its bytes, and its layout; None for "no state yet".

    `known` is the likely layout, which saves parsing it; `expected` is the header written last.
    Raises ValueError if the bytes are damaged, or not those written last.
    """
    try:
        header = SwapHeader.of(buffer)
        found = _unpacked(buffer, header, known) if header.description_bytes else None
        if expected is not None and header.checksum != expected.checksum:
            raise ValueError(
                f"it is whole, but of step {header.step} and not what this run wrote last, at step "
                f"{expected.step}: a write failed, or another program writes there"
            )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return found


def _unpacked(buffer: Tensor, header: SwapHeader, known: Layout | None) -> tuple[dict, Layout]:
    text = bytes(buffer[HEADER_BYTES:][: header.description_bytes].numpy())
    is_known = known is not None and text == known.description
    layout = known if is_known else Layout.from_description(text)
    if not header.end == layout.offsets[-1] <= buffer.numel():
        raise ValueError(
            f"got {buffer.numel()} bytes with tensors up to {header.end}, expected "
            f"{layout.offsets[-1]}; the file is damaged or cut short"
        )
    if checksum(buffer) != header.checksum:
        raise ValueError("its checksum is wrong: a write or a read of it failed, or it was changed")
    names = [one.name for one in layout.algorithm.memory]
    numbers = {"step": checked_step({"step": header.step})}
    numbers |= checked_memory(layout.algorithm, dict(zip(names, header.memory, strict=False)))
    return layout.state_in(buffer, numbers), layout


def read_whole(path: str, folder: Path | None = None) -> tuple[dict, Layout] | None:
    """Map a file into memory and return the result of `unpack`; follow no links below `folder`."""
    return unpack(mapped(Path(path), folder), path)


def write_empty(path: str, num_bytes: int) -> SwapHeader:
    """Write a file of this size that means "no state yet", over any old one; return its header."""
    header = SwapHeader(0, 0, 0, 0, ())
    Path(path).write_bytes(header.packed().ljust(num_bytes, b"\0"))
    return header


def _tensors(state: dict, layout: Layout) -> list[Tensor]:
    tensors = [t for name in layout.algorithm.moment_names for t in state[name].store.buffers]
    return tensors + [state[key] for key in ("param_correction",) if key in state]


def _put(buffer: Tensor, offset: int, data: bytes) -> None:
    buffer.numpy()[offset : offset + len(data)] = memoryview(data)


def checksum(buffer: Tensor) -> int:
    """Return the checksum for the bytes of a file, shape (file bytes,) uint8."""
    begin = bytearray(buffer[:HEADER_BYTES].numpy())
    begin[_CHECKSUM] = bytes(8)
    return hash_64((begin, buffer[HEADER_BYTES:].numpy()))
