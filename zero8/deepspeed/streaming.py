# SPDX-License-Identifier: Apache-2.0
"""Sub-groups of ZeRO-3 on a disk, in memory while they step.

A step over mapped pages would wait at each of them.  So a sub-group is read into a slot, past the
page cache, while the one before it steps and the one before that is written.  Between steps all
tensors are in their mapped files.

If a transfer fails, the rank logs the error and ends, as it does where a mapped page cannot be
read: what has been stepped is lost, and a rank that raised alone would leave the others waiting.
"""

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import FileIO
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero8.deepspeed.moment_tensor import MomentTensor
from zero8.files.scratch import file_of, in_pages
from zero8.state.tell import logger

SLOTS = 3
"""How many sub-groups are in memory: with two, a read would wait for a write."""
_MOST_BYTES = 1 << 30  # Linux transfers less than 2 GiB at once


class Part(NamedTuple):
    """A tensor of a sub-group in a file, and what puts another in its place."""

    home: Tensor
    put: Callable[[Tensor], None]


class SubGroup(NamedTuple):
    """A partition, its home, and its state."""

    p: Tensor
    home: Tensor
    state: dict[str, Any]

    def parts(self) -> list[Part]:
        """Return its tensors that are in files."""
        return [part for part in _tensors_of(*self) if file_of(part.home) is not None]


def _tensors_of(p: Tensor, home: Tensor, state: dict[str, Any]) -> Iterator[Part]:
    if p.data_ptr() == home.data_ptr():  # unless it is the model's weights themselves
        yield Part(home, partial(setattr, p, "data"))
    for key, value in state.items():
        if isinstance(value, MomentTensor):
            for name in ("codes", "scales", "dense"):
                yield Part(getattr(value.store, name), partial(setattr, value.store, name))
        elif isinstance(value, Tensor):
            yield Part(value, partial(state.__setitem__, key))


class _Slot:
    """Memory for a sub-group.

    Attributes:
        number: the sub-group whose tensors it has, or is to have; None if there is none.
        is_taken: whether they are used here, and not in their files.
        pending: the last transfer.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_taken = False
        self.pending: Future[None] = Future()
        self.pending.set_result(None)
        self._memory, self._parts = mmap.mmap(-1, mmap.PAGESIZE), list[Part]()

    def read(self, number: int, parts: list[Part], threads: ThreadPoolExecutor) -> None:
        """Begin to read a sub-group."""
        self.number, self._parts = number, parts
        num_bytes = sum(in_pages(part.home.nbytes) for part in parts)
        if num_bytes > len(self._memory):
            self._memory = mmap.mmap(-1, num_bytes)
        self.pending = threads.submit(_transfer, os.preadv, self._places(), self.pending)

    def take(self) -> None:
        """Use its tensors here."""
        _finish(self.pending)
        self.is_taken = True
        for (home, put), place in zip(self._parts, self._places(), strict=True):
            here = torch.frombuffer(place[1], dtype=home.dtype, count=home.numel())
            put(here.view(home.shape))

    def give_back(self, threads: ThreadPoolExecutor) -> None:
        """Use its tensors in their files, and begin to write these."""
        for home, put in self._parts:
            put(home)
        self.pending = threads.submit(_transfer, os.pwritev, self._places(), self.pending)
        self.number, self.is_taken = None, False

    def _places(self) -> list[tuple[FileIO, memoryview]]:
        """Return the file of each tensor, and its place in memory."""
        sizes = [in_pages(part.home.nbytes) for part in self._parts]
        whole = memoryview(self._memory)
        return [
            (file, whole[end - size : end])
            for part, size, end in zip(self._parts, sizes, accumulate(sizes), strict=True)
            if (file := file_of(part.home))
        ]


class Stream:
    """Slots, and threads that fill and empty them."""

    def __init__(self) -> None:
        """Start without transfers."""
        self._threads = ThreadPoolExecutor(SLOTS, "zero8-disk")
        self._slots = [_Slot() for _ in range(SLOTS)]

    def read_ahead(self, number: int, sub_group: SubGroup) -> None:
        """Begin to read a sub-group, unless it has been read, or is being read."""
        slot = self._slots[number % SLOTS]
        if slot.number == number:
            return
        if slot.is_taken:  # by one whose step has raised
            slot.give_back(self._threads)
        slot.read(number, sub_group.parts(), self._threads)

    def take(self, number: int, sub_group: SubGroup) -> None:
        """Have the tensors of a sub-group in memory."""
        self.read_ahead(number, sub_group)
        self._slots[number % SLOTS].take()

    def give_back(self, number: int) -> None:
        """Have the tensors of a sub-group in their files, when `wait` has been called."""
        slot = self._slots[number % SLOTS]
        if slot.number == number and slot.is_taken:
            slot.give_back(self._threads)

    def wait(self) -> None:
        """Wait for all transfers, and forget what has been read: files may be written to."""
        for slot in self._slots:
            _finish(slot.pending)
            if not slot.is_taken:
                slot.number = None


def _transfer(call: Callable, places: list[tuple[FileIO, memoryview]], before: Future) -> None:
    """Read or write whole files after another transfer of the same memory."""
    before.result()
    for file, place in places:
        done = 0
        while done < len(place):
            count = call(file.fileno(), [place[done : done + _MOST_BYTES]], done)
            if not count:
                raise OSError(errno.EIO, f"{len(place) - done} bytes are missing")
            done += count


def _finish(transfer: Future) -> None:
    try:
        transfer.result()
    except OSError:
        logger.critical("zero8: a transfer of optimizer states has failed", exc_info=True)
        end_process()


def end_process() -> None:
    """End this process at once."""
    os._exit(1)
