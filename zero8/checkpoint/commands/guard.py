# SPDX-License-Identifier: Apache-2.0
"""Runs a command in a child process, so that SIGBUS there becomes an error message.

If another program truncates a file that is mapped into memory, access to the missing bytes kills
the process by SIGBUS, which Python cannot catch.
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

    Signals sent to this process are forwarded, except a terminal's, which the child gets itself.  A
    signal that kills the child kills this process, too.

    Raises:
        FileCutError: if SIGBUS killed the child.
        OSError: if the fork fails.
    """
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD})
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before prctl
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
    """Wait for a process, forwarding signals to it; return its exit status."""
    while True:
        info = signal.sigwaitinfo({*FORWARDED, signal.SIGCHLD})
        if info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        elif info.si_code <= 0:  # from a process, and not from a terminal to the process group
            os.kill(child, info.si_signo)
