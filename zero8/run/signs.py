# SPDX-License-Identifier: Apache-2.0
"""Signs of life of a rank, for the process that watches it."""

import os
import time
from threading import Thread

from zero8.run.limits import Groups

EVERY_S = 1.0


def give_signs(descriptor: int, groups: Groups) -> None:
    """Write a byte a second to a pipe, from a thread, for as long as this process runs.

    A process that is stopped, or that has held the interpreter's lock for long, writes none.
    """
    # Not for the processes that this one starts: the pipe ends with the rank.
    os.set_inheritable(descriptor, False)
    Thread(target=_give, args=(descriptor, groups), name="zero8 signs of life", daemon=True).start()


def _give(descriptor: int, groups: Groups) -> None:
    while True:
        try:
            os.write(descriptor, b".")
        except BrokenPipeError:
            return  # the watching process ends this one
        groups.check()
        time.sleep(EVERY_S)
