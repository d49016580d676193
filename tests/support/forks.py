# SPDX-License-Identifier: Apache-2.0
"""Runs Python code in forks of one process that has imported torch, which takes seconds.

A fork has an environment, arguments, output and an exit status of its own.  Code that tests the
import of torch, or what is imported before it, needs `processes.python`.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from places import SUPPORT

SERVE = f"import sys; sys.path.append({str(SUPPORT)!r}); import forks; forks.serve()"


class Forks:
    """A process that forks for each call of `run`.

    Args:
        folder: a new one, for the output.
        before: the code that the process runs before it forks.
    """

    def __init__(self, folder: Path, before: str = "import torch"):
        """Start the process."""
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{before}\n{SERVE}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, code: str, *arguments: str, seconds: float = 120, **env: str | None
    ) -> subprocess.CompletedProcess:
        """Run code to its end; return its status, stdout and stderr.

        A variable given as None is taken out of the environment.
        """
        variables = {k: v for k, v in (os.environ | env).items() if v is not None}
        paths = [self._folder / name for name in ("out", "err")]
        job = [code, ["-c", *arguments], variables, [str(path) for path in paths]]
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], seconds)[0], "time limit"
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(code, status, *(path.read_text() for path in paths))

    def close(self) -> None:
        """End the process and what its forks have left behind."""
        import processes  # not in the server, where what it imports may be missing

        for pid in processes.session(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.communicate()


def serve() -> None:
    """Run the code of each line of stdin in a fork, and print its exit status."""
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            _become(*job)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(code: str, arguments: list[str], variables: dict, paths: list[str]) -> None:
    """Run code in this process, which ends with it."""
    try:
        created = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        for number, path, flags in zip(
            range(3), (os.devnull, *paths), (os.O_RDONLY, created, created), strict=True
        ):
            os.dup2(os.open(path, flags, 0o600), number)
        os.environ.clear()
        os.environ.update(variables)
        sys.argv[:] = arguments
        status = status_of(lambda: exec(code, {"__name__": "__main__"}))
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os._exit(70)
    os._exit(status)  # the end of an interpreter that has imported torch takes a second


def status_of(call: Callable[[], int | None]) -> int:
    """Return the exit status of a call, and print errors as Python does."""
    try:
        return call() or 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
