# SPDX-License-Identifier: Apache-2.0
"""One thread that works beside the others, and what they wait for.

Work is cut into units.  Whoever needs what a unit makes waits for that unit; whoever needs all of
it, such as a save, waits for all.  A fork waits for all, too: the new process has a copy of the
memory and lacks the thread, so it works where it calls.  So does the end of Python.
"""

import os
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakSet

import torch


class Worker:
    """A thread that does the units of work given to it, in their order.

    It has a set of kernel threads of its own, as many as the thread that makes it.  An exception in
    a unit ends that unit only; the first one is kept until `raise_error`.
    """

    def __init__(self, name: str):
        """Start without work; `name` is the thread's, for debuggers."""
        self._process = os.getpid()
        self._pending: dict[Hashable, Future[None]] = {}
        self._error: BaseException | None = None
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

    @property
    def has_failed(self) -> bool:
        """Whether a unit has raised an exception that is kept."""
        return self._error is not None

    def take_error(self) -> BaseException | None:
        """Return the exception that is kept, and keep it no longer."""
        error, self._error = self._error, None
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
            if self._error is None:
                self._error = error


_alive: WeakSet[Worker] = WeakSet()


def _wait_for_all() -> None:
    for worker in list(_alive):
        worker.wait_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_all)
