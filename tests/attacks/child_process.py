# SPDX-License-Identifier: Apache-2.0
"""Runs a command in a forked child, with limits on its time and memory.

Torch and zero8 are imported before the fork, so a command starts at once; a crash, a hang or
memory that grows is the child's alone.
"""

import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forks import status_of

from zero8 import cli
from zero8.checkpoint.commands import command  # noqa: F401, for the children
from zero8.files import tagged  # noqa: F401, for the children

ADDRESS_SPACE_BYTES = 4 << 30
"""The address space that a command may add, so that it does not take the machine's memory."""


@dataclass(frozen=True)
class Answer:
    """How a command ended.

    Attributes:
        status: its exit status; negative for a signal, None if it was killed at its time limit.
        text: what it wrote to stdout and stderr.
        seconds: from its start to its end.
        mib: peak memory above that of its start.
    """

    status: int | None
    text: str
    seconds: float
    mib: int


@dataclass(frozen=True)
class Child:
    """A running command.

    Attributes:
        pid: its process, which leads a process group.
        output: the file that it writes to.
        began: when it was started.
        mib: the memory that it shared with its parent then.
    """

    pid: int
    output: Path
    began: float
    mib: int

    def is_over(self, seconds: float) -> bool:
        """Return whether the command has had so much time."""
        return time.monotonic() > self.began + seconds

    def answer(self, seconds: float) -> Answer:
        """Wait until the command ends, or kill it when the time is over."""
        descriptor = os.pidfd_open(self.pid)
        left = self.began + seconds - time.monotonic()
        ended, _, _ = select.select([descriptor], [], [], max(0.0, left))
        os.close(descriptor)
        os.killpg(self.pid, signal.SIGKILL)  # its children too
        _, waited, usage = os.wait4(self.pid, 0)
        status = os.waitstatus_to_exitcode(waited) if ended else None
        text = self.output.read_text(errors="replace")
        spent = time.monotonic() - self.began
        return Answer(status, text, spent, max(0, usage.ru_maxrss // 1024 - self.mib))


def start(line: Sequence[str], output: Path) -> Child:
    """Start a command, whose stdout and stderr go to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    began, mib = time.monotonic(), (_memory_bytes(1) - _memory_bytes(2)) >> 20
    pid = os.fork()
    if not pid:
        try:
            _become(line, output)
        finally:
            os._exit(70)
    with suppress(OSError):  # the child does it too, whoever comes first
        os.setpgid(pid, pid)
    return Child(pid, output, began, mib)


def answer_of(line: list[str], output: Path, seconds: float) -> Answer:
    """Run a command."""
    return start(line, output).answer(seconds)


def _become(line: Sequence[str], output: Path) -> None:
    """Run a command in this process, which ends with it."""
    os.setpgid(0, 0)
    os.chdir(output.parent)
    for path, flags, descriptors in (
        (os.devnull, os.O_RDONLY, (0,)),
        (output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, (1, 2)),
    ):
        opened = os.open(path, flags, 0o600)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
    limit = _memory_bytes(0) + ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = status_of(lambda: _run(line))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(line: Sequence[str]) -> int | None:
    """Run a command and return its status."""
    if line[0] == "zero8":
        return cli.main(line[1:])
    exec(line[2], {"__name__": "__main__"})
    return None


def _memory_bytes(column: int) -> int:
    """Return the size (column 0) of this process's memory, or its part that is resident (1), and of
    that the part which is of files (2).
    """
    return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()
