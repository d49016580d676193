# SPDX-License-Identifier: Apache-2.0
"""The steps of an optimizer behind the next forward: in which order, who waits, who raises.

A unit of work is the step of what the forward gathers together.  Units are worked off in the order
in which the last forward needed them, and who gathers one waits for it.

If a unit fails, the rank keeps the error, and leaves the units after it undone.  Gathers
go on with these weights: a rank that raised alone would leave the others waiting.  `agree`, at the
next step, save or load, which all ranks enter, raises on all.  A single rank raises where it waits
next.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from zero8.environment import numbers
from zero8.environment.agree import raise_together
from zero8.environment.worker import Worker


class Behind:
    """A thread, and the order of its units, which are numbers.

    Attributes:
        worker: the thread.
    """

    def __init__(self) -> None:
        """Start without work."""
        self.worker = Worker("zero8-step")
        self._used: dict[int, None] = {}  # since work was begun, in that order
        self._order: list[int] = []
        self._is_agreed = True  # whether the ranks know of all errors

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

    def wait(self) -> None:
        """Wait for pending steps, as code must that reads or writes a parameter by itself."""
        self.worker.wait_all()
        self._raise_alone()

    def agree(self, groups: Sequence[numbers.Group] = (None,)) -> None:
        """Wait for all units; raise on all ranks if one failed.  All ranks must call it.

        `groups` are those that together reach the ranks, one after the other.
        """
        self.wait()
        if not self._is_agreed:
            self._is_agreed = True
            what = "take the optimizer's step behind the forward"
            raise_together(self.worker.take_error(), what, groups)

    def _do(self, work: Callable[[], None]) -> None:
        if not self.worker.has_failed:
            work()

    def _raise_alone(self) -> None:
        if numbers.num_ranks() == 1:
            self.worker.raise_error()
