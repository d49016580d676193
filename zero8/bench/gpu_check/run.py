# SPDX-License-Identifier: Apache-2.0
"""Runs a command with a time limit, after which nothing of what it has started is left."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# For what a command does on SIGTERM: torchrun ends its ranks.
GRACE_SECONDS = 10


class Done(NamedTuple):
    """How a command ended: its exit status, None if it was stopped, and how long it took."""

    status: int | None
    seconds: float


def run_limited(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    limit_s: float,
    folder: Path,
) -> Done:
    """Run a command in a session of its own and end all of it, whatever happens meanwhile.

    Args:
        command: the words of the command.
        environment: variables besides those of this process.
        log: file for what the command prints.
        limit_s: seconds after which it is stopped.
        folder: where it runs.
    """
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_s)
        finally:
            _end(process)
    return Done(status, time.monotonic() - began)


def _end(process: subprocess.Popen) -> None:
    import psutil  # of zero8[launch]

    family = []
    if process.poll() is None:
        # torchrun's ranks are in sessions of their own: no signal to the group reaches them.
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
