# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks, each a fresh process, with a time limit for all of them."""

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent


def run_ranks(function, world_size: int, tmp_path: Path, timeout_s: float = 180, **kwargs) -> list:
    """Return what `function(**kwargs)` returned on each rank.

    The function is one of a module in tests/; arguments and results cross by torch.save.

    Raises:
        AssertionError: with the rank's output if a rank failed or the time ran out; all processes
            that were started are gone then.
    """
    folder = tmp_path / f"ranks-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    torch.save(kwargs, folder / "kwargs.pt")
    port = _free_port()
    processes = []
    for rank in range(world_size):
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(TESTS),
        }
        command = [sys.executable, str(Path(__file__)), function.__module__, function.__name__]
        with open(folder / f"rank{rank}.log", "w") as log:
            processes.append(
                subprocess.Popen(
                    [*command, str(folder)],
                    env=env,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    try:
        _wait(processes, folder, timeout_s)
    finally:
        for process in processes:
            _kill(process)
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(world_size)]


def _wait(processes: list, folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        failed = [r for r, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for rank, process in enumerate(processes):
        if process.poll() != 0:
            reason = f"exit status {process.poll()}" if process.poll() else "time limit"
            log = (folder / f"rank{rank}.log").read_text()[-6000:]
            raise AssertionError(f"rank {rank}: {reason}\n{log}")


def _kill(process) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _main() -> None:
    module, name, folder = sys.argv[1:]
    kwargs = torch.load(Path(folder) / "kwargs.pt", weights_only=False)
    result = getattr(importlib.import_module(module), name)(**kwargs)
    torch.save(result, Path(folder) / f"rank{os.environ['RANK']}.pt")
    # Interpreter shutdown with live gloo threads can hang; the result is on disk.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
