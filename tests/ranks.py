# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks, each a fresh process, with a time limit for all of them."""

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent


def run_ranks(
    function, world_size: int, tmp_path: Path, timeout_s: float = 180, kill=False, **kwargs
) -> list:
    """Return what `function(**kwargs)` returned, or passed to `report`, on each rank.

    The function is one of a module in tests/; arguments and results cross by torch.save.

    Args:
        function: what to run.
        world_size: number of ranks.
        tmp_path: a folder to work in.
        timeout_s: seconds for all ranks together.
        kill: whether the function goes on after `report`, until it is killed with SIGKILL; it is,
            as soon as every rank has reported.
        **kwargs: passed to the function.

    Raises:
        AssertionError: with the rank's output if a rank failed or the time ran out; all processes
            that were started are gone then.
    """
    build_ops()
    folder = _make_folder(tmp_path, kwargs)
    results = [folder / f"rank{rank}.pt" for rank in range(world_size)]
    port, processes = free_port(), []
    try:
        for rank in range(world_size):
            job = [function.__module__, function.__name__, str(folder)]
            processes.append(_start(job, folder, rank, world_size, port))
        _wait(processes, folder, timeout_s, results if kill else None)
    finally:
        for process in processes:
            _kill(process)
    if kill:
        ended = [process.returncode for process in processes]
        assert ended == [-signal.SIGKILL] * world_size, f"ended before they were killed: {ended}"
    return [torch.load(path, weights_only=False) for path in results]


class StandingRanks:
    """Ranks that stay and run one function after another: they start, and import, only once.

    Args:
        world_size: number of ranks.
        tmp_path: a folder to work in.
    """

    def __init__(self, world_size: int, tmp_path: Path):
        self._world_size, self._tmp_path = world_size, tmp_path
        self._processes: list[subprocess.Popen] = []

    def run(self, function, timeout_s: float = 180, **kwargs) -> list:
        """Return what `function(**kwargs)` returned on each rank; see `run_ranks`.

        Raises:
            AssertionError: as `run_ranks`; the next call starts with fresh processes then.
        """
        if not self._processes:
            self._start()
        folder = _make_folder(self._tmp_path, kwargs)
        results = [folder / f"rank{rank}.pt" for rank in range(self._world_size)]
        try:
            for process in self._processes:
                process.stdin.write(
                    f"{function.__module__} {function.__name__} {folder}\n".encode()
                )
                process.stdin.flush()
            _wait(self._processes, self._logs, timeout_s, results)
        except BaseException:  # an interrupt too must leave no process behind
            self.close()
            raise
        return [torch.load(path, weights_only=False) for path in results]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            _kill(process)
            process.stdin.close()
        self._processes = []

    def _start(self) -> None:
        build_ops()
        self._logs, port = _make_folder(self._tmp_path, {}), free_port()
        for rank in range(self._world_size):
            self._processes.append(_start([], self._logs, rank, self._world_size, port))


def report(result) -> None:
    """Hand a rank's result over, once; a function that just returns need not call it."""
    _save(result, Path(sys.argv[-1]))


def _save(result, folder: Path) -> None:
    path = folder / f"rank{os.environ['RANK']}.pt"
    torch.save(result, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def _make_folder(tmp_path: Path, kwargs: dict) -> Path:
    folder = tmp_path / f"ranks-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    torch.save(kwargs, folder / "kwargs.pt")
    return folder


@lru_cache(maxsize=1)
def build_ops() -> None:
    # Here, because ranks may be killed, and a killed build leaves a lock that DeepSpeed waits for.
    from zero8.train.build import build_ops, build_shared_memory

    build_ops()
    build_shared_memory()


def _start(job: list[str], logs: Path, rank: int, world_size: int, port: int) -> subprocess.Popen:
    """Start a rank on one job (module, function, folder), or on those that its stdin will name."""
    # Without LOCAL_SIZE DeepSpeed's all_reduce over shared memory stays off: it would leave 66 MiB
    # per rank and run in /dev/shm, which is memory.
    env = {name: value for name, value in os.environ.items() if name != "LOCAL_SIZE"} | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))),
    }
    with open(logs / f"rank{rank}.log", "w") as log:
        return subprocess.Popen(
            [sys.executable, str(Path(__file__)), *job],
            env=env,
            stdin=subprocess.DEVNULL if job else subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def error_of(function, *args, **kwargs) -> tuple[str, str] | None:
    """Return the type and text of what a call raises, None if it returns.

    Any exception: one that ended this rank would leave the others waiting for it.
    """
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _wait(processes: list, folder: Path, timeout_s: float, results: list[Path] | None) -> None:
    """Wait until all processes have ended, or, given their results' paths, until these exist."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes) or (results is None and codes == [0] * len(codes)):
            break
        if results is not None and all(path.exists() for path in results):
            return
        time.sleep(0.05)
    # A rank that died takes the others along: blame the first that ended by itself.
    for rank, process in sorted(enumerate(processes), key=lambda pair: pair[1].poll() is None):
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _main() -> None:
    named = (line.rstrip("\n").split(" ", 2) for line in sys.stdin)
    jobs = [sys.argv[1:]] if sys.argv[1:] else named
    for module, name, folder in jobs:
        kwargs = torch.load(Path(folder) / "kwargs.pt", weights_only=False)
        _save(getattr(importlib.import_module(module), name)(**kwargs), Path(folder))
    # Interpreter shutdown with live gloo threads can hang; the result is on disk.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
