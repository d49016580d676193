# SPDX-License-Identifier: Apache-2.0
"""Runs Python code in forks of one process that has done the slow imports.

A fork has an environment, arguments, output and an exit status of its own.  Code that tests the
import of torch, or what is imported before it, needs `processes.python`.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from places import SUPPORT


class Forks:
    """A process that forks, and says how its forks ended; it ends with this one, or this object.

    Args:
        folder: a new one, for the output that `run` returns.
        before: the code that the process runs first.
        env: its environment, by default that of this process.
    """

    def __init__(self, folder: Path | None, before: str = "import torch", env: dict | None = None):
        """Start the process."""
        self._folder = folder
        self._socket, theirs = socket.socketpair()
        with theirs:
            serve = f"import forks; forks.serve({theirs.fileno()})"
            code = f"{before}\nimport sys; sys.path.append({str(SUPPORT)!r}); {serve}"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt of the tests ends the forks first
            )

    def run(
        self, code: str, *arguments: str, seconds: float = 120, **env: str | None
    ) -> subprocess.CompletedProcess:
        """Run code to its end; return its status, stdout and stderr.

        A variable given as None is taken out of the environment.
        """
        variables = {k: v for k, v in (os.environ | env).items() if v is not None}
        out, err = paths = [self._folder / name for name in ("out", "err")]
        with open(os.devnull) as stdin, out.open("w") as stdout, err.open("w") as stderr:
            fork = self.fork(code, arguments, variables, (stdin, stdout, stderr))
        try:
            status = fork.wait(seconds)
        finally:
            fork.kill()
        assert status is not None, "time limit"
        return subprocess.CompletedProcess(code, status, *(path.read_text() for path in paths))

    def fork(self, code: str, arguments: Sequence[str], env: dict, files: Sequence) -> "Fork":
        """Start code with the files that it has for stdin, stdout and stderr."""
        pid = self.answer(["fork", [code, ["-c", *arguments], env]], [f.fileno() for f in files])
        return Fork(self, pid)

    def answer(self, job: list, descriptors: Sequence[int] = ()) -> int:
        """Return the answer to a job: a fork's process, or its exit status."""
        text = json.dumps(job).encode()
        socket.send_fds(self._socket, [len(text).to_bytes(8, "big")], descriptors)
        self._socket.sendall(text)
        return int(self._socket.recv(64))

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.wait()


class Fork:
    """A fork as subprocess.Popen would present it; it leads a session."""

    stdin: BinaryIO

    def __init__(self, server: Forks, pid: int):
        self.pid, self.returncode = pid, None
        self._server, self._descriptor = server, os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit status if it has ended."""
        return self.wait(0)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until it ends; return the exit status."""
        if self.returncode is None and select.select([self._descriptor], [], [], seconds)[0]:
            os.close(self._descriptor)
            self.returncode = self._server.answer(["wait", self.pid])
        return self.returncode

    def kill(self) -> None:
        """Kill it and its children, and wait until it has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def serve(descriptor: int) -> None:
    """Do the jobs of a socket until it is closed; return in no fork."""
    with socket.socket(fileno=descriptor) as jobs:
        while True:
            size, descriptors, *_ = socket.recv_fds(jobs, 8, 3)
            if not size:
                return
            what, argument = json.loads(jobs.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
            if what == "wait":
                status = os.waitstatus_to_exitcode(os.waitpid(argument, 0)[1])
                jobs.sendall(str(status).encode())
            elif not os.fork():
                os.setsid()
                jobs.sendall(str(os.getpid()).encode())
                break
            for one in descriptors:
                os.close(one)
    _become(*argument, descriptors)


def _become(code: str, arguments: list[str], variables: dict, descriptors: list[int]) -> None:
    """Run code in this process, which ends with it."""
    status = 1
    try:
        for number, one in enumerate(descriptors):
            os.dup2(one, number)
            os.close(one)
        os.environ.clear()
        os.environ.update(variables)
        sys.argv[:] = arguments
        exec(code, {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = 1 if isinstance(end.code, str) else end.code or 0
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the end of an interpreter that has imported torch takes a second
