# SPDX-License-Identifier: Apache-2.0
"""Waits for gloo's threads at the end of a process.

A thread of gloo drops the tensors of a collective after the ranks have the result, and takes
Python's lock for that.  If Python ends in between, torch aborts the process, and launchers report
a failed training (https://github.com/pytorch/pytorch/issues/190489).  The last collective before
the end is often one of `save_checkpoint`'s.

The threads cannot be ended from here.  Only the destructor of the group joins them:
`destroy_process_group` does not run it while an engine or a mesh holds the group, and gloo's
`shutdown` and `abort` do nothing.  But Linux tells what a thread waits for.  An idle one waits
without a time limit on a condition variable; one that waits for Python's lock has a time limit, and
one that waits for a mutex expects the value 2.
"""

import atexit
import functools
import platform
import time
from pathlib import Path

_FUTEX = {"x86_64": 202, "aarch64": 98}
"""The number of the system call by processor."""
_WAIT_BITSET = 9
_LIMIT_S = 10.0
_PAUSE_S = 0.1


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """Make this process wait before it ends until gloo's threads are idle.

    It waits for 10 s at most: a collective that other ranks have not joined never ends.  Where the
    system does not tell what threads wait for, it pauses for 0.1 s.
    """
    atexit.register(_wait)


def _wait() -> None:
    end = time.monotonic() + _LIMIT_S
    try:
        futex = _FUTEX[platform.machine()]
        names = Path("/proc/self/task").glob("*/comm")
        threads = [name.parent for name in names if name.read_text() == "pt_gloo_runloop\n"]
        while not all(_is_idle(thread, futex) for thread in threads) and time.monotonic() < end:
            time.sleep(0.001)  # other threads can take Python's lock
    except (KeyError, OSError):
        time.sleep(_PAUSE_S)


def _is_idle(thread: Path, futex: int) -> bool:
    """Return whether a thread waits on a condition variable without a time limit."""
    call = (thread / "syscall").read_text().split()
    if call[0] != str(futex):  # "running", or in another system call
        return False
    operation, value, timeout = (int(word, 16) for word in call[2:5])
    # glibc before 2.34 waits without a bit set, and for the value 0.
    return timeout == 0 and (operation & 0x7F == _WAIT_BITSET or value == 0)
