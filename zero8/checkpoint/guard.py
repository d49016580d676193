# SPDX-License-Identifier: Apache-2.0
"""Runs a command in a process of its own, so that the end of that process becomes an error.

Files are mapped into memory.  The kernel ends a process by SIGBUS if it looks at bytes of a mapped
file that another program has cut off meanwhile, and Python cannot catch that signal.
"""

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


class FileCutError(Exception):
    """A file was cut short while it was read."""


def in_child(command: Callable[[], int]) -> int:
    """Run a command in a forked process, before there are threads; return its exit status.

    The call returns in both processes, in each with that status.  A signal that ends the child ends
    the parent, too, and the other way round.

    Raises:
        FileCutError: in the parent, if the child was ended by SIGBUS.
    """
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        return command()
    status = os.waitstatus_to_exitcode(_waited_for(child))
    if status == -signal.SIGBUS:
        raise FileCutError("a file was cut short while it was read: is another program writing it?")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _waited_for(child: int) -> int:
    while True:
        try:
            return os.waitpid(child, 0)[1]
        except KeyboardInterrupt:  # the child has got it as well
            continue
