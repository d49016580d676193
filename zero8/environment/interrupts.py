# SPDX-License-Identifier: Apache-2.0
"""Defers signal handlers, so that they cannot interrupt changes that belong together."""

# The functions of `signal` call these, and make enums of all numbers: half a millisecond in all.
import _signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

SIGNALS = tuple(_signal.valid_signals())


@contextmanager
def put_off() -> Iterator[None]:
    """Run the block to its end before any signal handler that is written in Python.

    Such handlers run between two instructions of the main thread, and may raise, as Ctrl-C's does.
    The handlers of signals that arrive in the block run after it.  Ctrl-C cannot end the block, so
    it must be short and must not wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {n: h for n in SIGNALS if callable(h := _signal.getsignal(n))}
    arrived: list[tuple[int, FrameType | None]] = []
    has_ended = False

    def later(number: int, frame: FrameType | None) -> None:
        if has_ended:  # an exception below kept the handler from being restored
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
        if arrived:
            with ExitStack() as each:  # calls all, whatever one of them raises
                for number, frame in reversed(arrived):
                    each.callback(handlers[number], number, frame)
