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

import errno
import itertools
import json
import os
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
from zero8.spec.shown import shown
from zero8.state.memory import checked_memory, counters
from zero8.state.plain import checked_step
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable

MAGIC = b"zero8swp"
FORMAT_VERSION = 1
HEADER = struct.Struct("<8sQIIqQ4d")
HEADER_BYTES = 512
_CHECKSUM = slice(8, 16)
TENSOR_ALIGNMENT_BYTES = 64
BLOCK_BYTES = 4096
"""Transfers that bypass the page cache are multiples of this."""


class SwapHeader(NamedTuple):
    """The header of a file, without the magic."""

    checksum: int
    version: int
    description_bytes: int
    step: int
    end: int
    memory: tuple[float, ...]

    @classmethod
    def parsed(cls, data: bytes, path: str) -> "SwapHeader":
        """Return the header in the first bytes of a file; raise ValueError if there is none."""
        if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
            raise ValueError(f"{path}: not a file of 8-bit optimizer states, or damaged")
        _, checksum, version, *numbers = HEADER.unpack_from(data)
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{path}: got format version {version}, this zero8 reads {FORMAT_VERSION}"
            )
        return cls(checksum, version, *numbers[:3], tuple(numbers[3:]))

    def packed(self) -> bytes:
        """Return the bytes of the header."""
        memory = self.memory + (0.0,) * (4 - len(self.memory))
        return HEADER.pack(MAGIC, *self[:5], *memory).ljust(HEADER_BYTES, b"\0")


@dataclass(frozen=True)
class Layout:
    """The contents of a state's file, and their offsets."""

    like: tuple[MomentStore, ...]  # the moments, on the meta device
    correction_numel: int  # of bfloat16 weights, one byte each
    text: bytes = b""  # the description as read from a file

    @classmethod
    def of_state(cls, state: dict) -> "Layout":
        """Return the layout for a ZeRO partition's state."""
        like = tuple(
            MomentStore.zeros(store.codec, store.rule, store.table, "meta")
            for store in _stores(state)
        )
        correction = state.get("param_correction")
        return cls(like, 0 if correction is None else correction.numel())

    @classmethod
    def from_description(cls, text: bytes, path: str) -> "Layout":
        """Return the layout that a description describes; raise ValueError if it is damaged."""
        try:
            found = json.loads(text)
            correction_numel = found.pop("correction_numel")
            moments = found["moments"]
            like = tuple(map(store_like, moments))
            rules = [store.rule for store in like]
            if rules != list(algorithm_called(rules[0].algorithm).moments):
                raise ValueError(f"got moments {[rule.name for rule in rules]}")
            if correction_numel not in (0, like[0].table.numel):
                raise ValueError(f"got {shown(correction_numel)} corrections")
            return cls(like, correction_numel, text)
        except (
            ValueError,
            KeyError,
            IndexError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise ValueError(
                f"{path}: its description is damaged, or of a later zero8: {error}"
            ) from error

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the moments."""
        return algorithm_called(self.like[0].rule.algorithm)

    @property
    def table(self) -> PieceTable:
        """The segment table of all moments."""
        return self.like[0].table

    def fits(self, state: dict) -> bool:
        """Return whether a state has this layout."""
        found = [(store.table, store.codec) for store in _stores(state)]
        correction = state.get("param_correction")
        return (
            found == [(like.table, like.codec) for like in self.like]
            and (0 if correction is None else correction.numel()) == self.correction_numel
        )

    @cached_property
    def description(self) -> bytes:
        """The JSON text that `from_description` reads."""
        moments = [{**moment_description(store), "written": False} for store in self.like]
        parts = {"moments": moments, "correction_numel": self.correction_numel}
        return self.text or json.dumps(parts).encode()

    @cached_property
    def num_bytes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        tensors = [t for s in self.like for t in s.buffers]
        return (*[t.numel() * t.element_size() for t in tensors], self.correction_numel)

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
        views = [
            buffer[offset : offset + count]
            for offset, count in zip(self.offsets, self.num_bytes, strict=False)
        ]
        state = dict(numbers)
        for number, like in enumerate(self.like):
            codes, scales, dense = views[3 * number : 3 * number + 3]
            scales = scales.view(torch.float32).view(like.scales.shape)
            buffers = codes, scales, dense.view(torch.float32)
            state[like.name] = MomentTensor(
                MomentStore(like.codec, like.rule, like.table, *buffers)
            )
        if self.correction_numel:
            state["param_correction"] = views[-1].view(torch.int8)
        return state


def aligned(num_bytes: int, alignment_bytes: int) -> int:
    """Return the next multiple of an alignment."""
    return -(-num_bytes // alignment_bytes) * alignment_bytes


def pack(state: dict, layout: Layout, buffer: Tensor) -> SwapHeader:
    """Write the bytes of a file into a buffer, shape (file bytes,) uint8; return its header.

    Tensors that are already views of the buffer, as from `unpack`, are not copied.
    """
    step, *memory = (state[name] for name in counters(layout.algorithm))
    numbers = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    for target, source in zip(
        _tensors(layout.state_in(buffer, numbers)), _tensors(state), strict=True
    ):
        if target.data_ptr() != source.data_ptr():
            target.copy_(source.view(target.shape))
    header = SwapHeader(
        checksum=0,
        version=FORMAT_VERSION,
        description_bytes=len(layout.description),
        step=int(step),
        end=layout.offsets[-1],
        memory=tuple(map(float, memory)),
    )
    _put(buffer, 0, header.packed())
    _put(buffer, HEADER_BYTES, layout.description)
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
    header = SwapHeader.parsed(bytes(buffer[:HEADER_BYTES].numpy()), path)
    if not header.description_bytes:
        _check_last(header, expected, path)
        return None
    text = bytes(buffer[HEADER_BYTES : HEADER_BYTES + header.description_bytes].numpy())
    fits = known is not None and text == known.description
    layout = known if fits else Layout.from_description(text, path)
    if not header.end == layout.offsets[-1] <= buffer.numel():
        raise ValueError(
            f"{path}: got {buffer.numel()} bytes with tensors up to {header.end}, expected "
            f"{layout.offsets[-1]}; the file is damaged or cut short"
        )
    if checksum(buffer) != header.checksum:
        raise ValueError(
            f"{path}: its checksum is wrong: a write or a read of it failed, or it was changed"
        )
    _check_last(header, expected, path)
    try:
        names = [one.name for one in layout.algorithm.memory]
        saved = dict(zip(names, header.memory, strict=False))
        numbers = {"step": checked_step({"step": header.step})}
        numbers |= checked_memory(layout.algorithm, saved)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return layout.state_in(buffer, numbers), layout


def _check_last(header: SwapHeader, expected: SwapHeader | None, path: str) -> None:
    if expected is not None and header[:5] != expected[:5]:
        raise ValueError(
            f"{path}: it is whole, but of step {header.step} and not what this run wrote last, at "
            f"step {expected.step}: a write failed, or another program writes there"
        )


def read_whole(path: str, folder: Path | None = None) -> tuple[dict, Layout] | None:
    """Map a file into memory and return the result of `unpack`; follow no links below `folder`."""
    data = mapped(Path(path), folder)
    if len(data) < HEADER_BYTES or len(data) % 8:
        raise ValueError(f"{path}: got {len(data)} bytes; the file is damaged or cut short")
    return unpack(data, path)


def write_empty(path: str, num_bytes: int) -> SwapHeader:
    """Write a file of this size that means "no state yet", over any old one; return its header."""
    header = SwapHeader(0, FORMAT_VERSION, 0, 0, 0, ())
    Path(path).write_bytes(header.packed().ljust(num_bytes, b"\0"))
    return header


def reserve(path: str, num_bytes: int) -> None:
    """Allocate disk blocks for a file, so that writing this many bytes cannot find the disk full.

    Raises OSError if there is no room; it names the file.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < num_bytes:
            os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        free = os.statvfs(path)
        raise OSError(
            error.errno or errno.EIO,
            f"{error.strerror}: {num_bytes} bytes are needed, {free.f_bavail * free.f_frsize} free",
            str(path),
        ) from error
    finally:
        os.close(descriptor)


def _stores(state: dict) -> list[MomentStore]:
    """Return the moments of a state in the algorithm's order."""
    found = {name: moment.store for name, moment in moments_in(state).items()}
    algorithm = algorithm_called(next(iter(found.values())).rule.algorithm)
    return [found[name] for name in algorithm.moment_names]


def _tensors(state: dict) -> list[Tensor]:
    tensors = [t for store in _stores(state) for t in store.buffers]
    return tensors + [state[key] for key in ("param_correction",) if key in state]


def _put(buffer: Tensor, offset: int, data: bytes) -> None:
    buffer.numpy()[offset : offset + len(data)] = memoryview(data)


def checksum(buffer: Tensor) -> int:
    """Return the checksum for the bytes of a file, shape (file bytes,) uint8."""
    begin = bytearray(buffer[:HEADER_BYTES].numpy())
    begin[_CHECKSUM] = bytes(8)
    return hash_64((begin, buffer[HEADER_BYTES:].numpy()))
