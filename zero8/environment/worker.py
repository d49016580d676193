# SPDX-License-Identifier: Apache-2.0
"""One thread that works beside the others: what they wait for, and who raises its errors.

Work is cut into units.  Whoever needs what a unit makes waits for that unit; whoever needs all of
it, such as a save, waits for all.  A fork waits for all, too: the new process has a copy of the
memory and lacks the thread, so it works where it calls.  So does the end of Python.
"""

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from weakref import WeakSet

import torch

from zero8.environment import ranks


class Worker:
    """A thread that does the units of work given to it, in their order.

    It has a set of kernel threads of its own, as many as the thread that makes it.  An exception in
    a unit ends that unit only; the first one is kept, as `error`, until `raise_error`.
    """

    def __init__(self, name: str):
        """Start without work; `name` is the thread's, for debuggers."""
        self._process = os.getpid()
        self._pending: dict[Hashable, Future[None]] = {}
        self.error: BaseException | None = None
        self._thread = ThreadPoolExecutor(
            1, name, torch.set_num_threads, (torch.get_num_threads(),)
        )
        self._ident: int | None = None
        _alive.add(self)

    def do(self, unit: Hashable, work: Callable[[], None]) -> None:
        """Do a unit of work after all that were given before; in a forked process at once."""
        if os.getpid() != self._process:
            work()
        else:
            self._pending[unit] = self._thread.submit(self._do, work)

    def wait(self, units: Iterable[Hashable]) -> None:
        """Wait for units that are under way.  Work itself never waits for other work."""
        if threading.get_ident() == self._ident:
            return
        for unit in units:
            if (pending := self._pending.get(unit)) is not None:
                pending.result()
                self._pending.pop(unit, None)

    def wait_all(self) -> None:
        """Wait for all work given so far."""
        if self._pending:
            self.wait(list(self._pending))

    def take_error(self) -> BaseException | None:
        """Return the exception that is kept, and keep it no longer."""
        error, self.error = self.error, None
        return error

    def raise_error(self) -> None:
        """Raise the exception that is kept, if there is one."""
        if (error := self.take_error()) is not None:
            raise error

    def close(self) -> None:
        """Wait for all work, and end the thread."""
        self.wait_all()
        self._thread.shutdown()

    def _do(self, work: Callable[[], None]) -> None:
        self._ident = threading.get_ident()
        try:
            work()
        except BaseException as error:  # whoever asks next gets it, as from a call
            if self.error is None:
                self.error = error


_alive: WeakSet[Worker] = WeakSet()


def _wait_for_all() -> None:
    for worker in list(_alive):
        worker.wait_all()


os.register_at_fork(before=_wait_for_all)


class StepsBeside:
    """Steps of an optimizer in a thread, beside the calls of `step`.

    If one fails, the rank keeps the error: a rank that raised alone would leave the others waiting.
    `agree`, at the next step, save or load, which all ranks enter, raises on all.  A single rank
    raises where it waits next.

    Attributes:
        worker: the thread.
    """

    def __init__(self, where: str):
        """Start without work; `where` is for messages."""
        self.worker, self._where = Worker("zero8-step"), where
        self._is_agreed = True  # whether the ranks know of all errors

    def wait(self) -> None:
        """Wait for pending steps, as code must that reads or writes a parameter by itself."""
        self.worker.wait_all()
        self._raise_alone()

    def agree(self, groups: Sequence[ranks.Group] = (None,)) -> None:
        """Wait for all steps; raise on all ranks if one failed.  All ranks must call it.

        `groups` are those that together reach the ranks, one after the other.
        """
        self.wait()
        if not self._is_agreed:
            self._is_agreed = True
            what = f"take the optimizer's step {self._where}"
            ranks.raise_together(self.worker.take_error(), what, groups)

    def _raise_alone(self) -> None:
        if ranks.num_ranks() == 1:
            self.worker.raise_error()


class Behind(StepsBeside):
    """The steps of an optimizer behind the next forward, in the order of its units.

    A unit, a number, is the step of what the forward gathers together.  Units are worked off in
    the order in which the last forward needed them, and who gathers one waits for it.  If a unit
    fails, those after it are left undone, and gathers go on with these weights.
    """

    def __init__(self) -> None:
        """Start without work."""
        super().__init__("behind the forward")
        self._used: dict[int, None] = {}  # since work was begun, in that order
        self._order: list[int] = []

    def do(self, works: Mapping[int, Callable[[], None]]) -> None:
        """Begin the work of units, in the order in which the last forward needed them."""
        self._order = list(dict.fromkeys([*self._used, *self._order, *works]))
        self._used.clear()
        self._is_agreed = False
        for unit in self._order:
            if unit in works:
                self.worker.do(unit, partial(self._do, works[unit]))

    def need(self, units: Iterable[int]) -> None:
        """Wait for units that the forward gathers."""
        found = dict.fromkeys(units)
        self._used |= found
        self.worker.wait(found)
        self._raise_alone()

    def _do(self, work: Callable[[], None]) -> None:
        if self.worker.error is None:
            work()
