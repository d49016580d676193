# SPDX-License-Identifier: Apache-2.0
"""Runs a command in a process of its own, so that the end of that process becomes an error.

Files are mapped into memory.  The kernel ends a process by SIGBUS if it looks at bytes of a mapped
file that another program has cut off meanwhile, and Python cannot catch that signal.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that ends a process with its parent."""
FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class FileCutError(Exception):
    """A file was cut short while it was read, or its disk failed."""


def in_child(command: Callable[[], int]) -> int:
    """Run a command in a forked process, before there are threads; return its exit status.

    Signals that somebody sends this process are forwarded, those of a terminal the child gets by
    itself.  What ends the child ends this process as well.

    Raises:
        FileCutError: if the child was ended by SIGBUS.
        OSError: if no process can be made.
    """
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD})
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended before the call
            sys.exit(1)
        sys.exit(command())
    status = _status_of(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD})
    if status == -signal.SIGBUS:
        raise FileCutError(
            "a file was cut short while it was read, or its disk failed: is another program "
            "writing it?"
        )
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler to restore
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _status_of(child: int) -> int:
    """Wait for a process, and forward signals to it meanwhile; return its exit status."""
    while True:
        info = signal.sigwaitinfo({*FORWARDED, signal.SIGCHLD})
        if info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        elif info.si_code <= 0:  # sent by a process, and not by a terminal to all of its group
            os.kill(child, info.si_signo)
