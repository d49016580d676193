# SPDX-License-Identifier: Apache-2.0
"""Puts signals off, so that what has to be done together is done or not begun."""

# The functions of `signal` call these, and make enums of all numbers: half a millisecond in all.
import _signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

SIGNALS = tuple(_signal.valid_signals())


@contextmanager
def put_off() -> Iterator[None]:
    """Run the block to its end before any handler of a signal that is written in Python.

    Such handlers run between two instructions of the main thread, and may raise, as that of Ctrl-C
    does.  Those of signals that arrive in the block run when it has ended.  Where the block waits
    for something that may never come, Ctrl-C does not end it: it should do neither much nor wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {n: h for n in SIGNALS if callable(h := _signal.getsignal(n))}
    arrived: list[tuple[int, FrameType | None]] = []
    has_ended = False

    def later(number: int, frame: FrameType | None) -> None:
        if has_ended:  # an exception below has kept it from being put back
            handlers[number](number, frame)
        else:
            arrived.append((number, frame))

    try:
        for number in handlers:
            _signal.signal(number, later)
        yield
    finally:
        has_ended = True
        for number, handler in handlers.items():
            _signal.signal(number, handler)
        with ExitStack() as each:  # calls all, whatever one of them raises
            for number, frame in reversed(arrived):
                each.callback(handlers[number], number, frame)
