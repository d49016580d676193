# SPDX-License-Identifier: Apache-2.0
"""Runs commands with a time limit for them and all their children."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

STEP = """
import torch, zero8
from zero8.op import kernel
p = torch.nn.Parameter(torch.ones(8192))
p.grad = torch.ones(8192)
zero8.Adam8bitBlockwise([p], lr=0.1).step()
assert (p < 1).all()
print("stepped with", kernel.module().__file__)
"""


@contextmanager
def started(command, **env):
    """Start a command in a session of its own, all of which is gone at the end of the block.

    A variable given as None is taken out of the environment.
    """
    merged = {k: v for k, v in (os.environ | env).items() if v is not None}
    process = subprocess.Popen(
        command,
        env=merged,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in session(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def session(leader):
    """Return the processes of a session; ninja puts every compiler into a group of its own."""
    pids = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                pids.append(pid)
    return pids


def run(command, seconds=120, **env):
    """Run a command to its end; return its status, stdout and stderr as CompletedProcess."""
    with started(command, **env) as process:
        out, err = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def compiler_in(folder: Path, options: str = "") -> dict[str, str | None]:
    """Make a c++ that notes its command lines in folder/log; return the environment for it.

    STALL=FILE in the environment stops it where it compiles until there is that file.
    """
    folder.mkdir()
    (folder / "log").touch()
    script = folder / "c++"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/log\n'
        'case "$STALL,$*" in ,*) ;; *" -c "*) until [ -e "$STALL" ]; do sleep 0.1; done;; esac\n'
        f'exec {shutil.which("c++")} "$@" {options}\n'
    )
    script.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "CXX": None}


def compiled(folder: Path) -> list[str]:
    return [line for line in (folder / "log").read_text().splitlines() if " -c " in line]


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "time limit"
        time.sleep(0.02)


def without(*packages) -> str:
    """Return code after which these packages cannot be imported."""
    return f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def python(code, seconds=120, **env):
    """Run Python code in a fresh process; see `run`."""
    return run([sys.executable, "-c", code], seconds, **env)
