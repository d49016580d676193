# SPDX-License-Identifier: Apache-2.0
"""Runs functions on several ranks, each a process, with a time limit for all of them."""

import faulthandler
import functools
import gc
import importlib
import inspect
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import torch
from forks import Fork, Forks
from places import FOLDERS

FIRST_ENGINE = "deepspeed.runtime.zero.muon.muon_optimizer"
"""A module that imports all that the first engine of a process does, which takes ten seconds."""

STACKS = signal.SIGUSR2
"""The signal at which a rank prints the stacks of its threads."""


@contextmanager
def ranks_of_sizes(
    make_folder: Callable[[str], Path],
) -> Iterator[Callable[..., "StandingRanks"]]:
    """Yield a function: of a world size and a device, the ranks; they are closed at the end.

    They start when they are first asked for, and again after a failure.
    """
    sets: dict[tuple[int, str], StandingRanks] = {}

    def of(world_size: int, device: str = "cpu") -> StandingRanks:
        if (world_size, device) not in sets:
            sets[world_size, device] = StandingRanks(world_size, make_folder("ranks"), device)
        return sets[world_size, device]

    yield of
    for ranks in sets.values():
        ranks.close(patience_s=10)


class StandingRanks:
    """Ranks that stay and run one function after another: they start, and import, only once.

    They are forks of one process per test run, which has done the slow imports; for GPUs it has
    imported nothing, as what may start CUDA must not be forked.

    Args:
        world_size: number of ranks.
        tmp_path: a folder to work in.
        device: "cpu", or "cuda", one GPU to a rank.
        imports: the module that forks have imported, by default with all of an engine's.
    """

    def __init__(
        self, world_size: int, tmp_path: Path, device: str = "cpu", imports: str = FIRST_ENGINE
    ):
        self._world_size, self._tmp_path, self._device = world_size, tmp_path, device
        self._imports = imports if device == "cpu" else ""
        self._processes: list[Fork] = []

    def run(self, function, timeout_s: float = 180, kill: bool = False, **kwargs) -> list:
        """Return what `function(**kwargs)` returned, or passed to `report`, on each rank.

        The function is one of a module in tests/; arguments and results cross by torch.save.  With
        `kill` it goes on after `report`, until all have reported and are killed with SIGKILL.
        Raises AssertionError with the rank's output if a rank failed or the time ran out.  All
        processes are gone then, as they are after `kill`; the next call starts new ones.
        """
        if not self._processes:
            self._start()
        try:
            folder = self._send(function, kwargs)
            results = [folder / f"rank{rank}.pt" for rank in range(self._world_size)]
            _wait(self._processes, self._logs, timeout_s, results)
        except BaseException:  # an interrupt too must leave no process behind
            self.close()
            raise
        if kill:
            ended = self.close()
            expected = [-signal.SIGKILL] * self._world_size
            assert ended == expected, f"ended before they were killed: {ended}"
        loaded = [torch.load(path, weights_only=False) for path in results]
        shutil.rmtree(folder)
        return loaded

    def run_to_the_end(self, function, timeout_s: float, **kwargs) -> list[int | None]:
        """Return the exit statuses of ranks that a function ends, None where it has not in time."""
        self._start()
        deadline = time.monotonic() + timeout_s
        try:
            self._send(function, kwargs)
            return [one.wait(max(0, deadline - time.monotonic())) for one in self._processes]
        finally:
            self.close()

    def _send(self, function, kwargs: dict) -> Path:
        """Have the ranks run a function; return the folder of its arguments and results."""
        folder = _make_folder(self._tmp_path, kwargs)
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has died: _wait says of what
                process.stdin.write(
                    f"{function.__module__} {function.__name__} {folder}\n".encode()
                )
                process.stdin.flush()
        return folder

    def close(self, patience_s: float = 0) -> list[int]:
        """End all processes, idle ones by the end of their input; return their statuses."""
        processes, self._processes = self._processes, []
        for process in processes:
            if patience_s:  # so that they write down which lines they ran
                process.stdin.close()
                process.wait(patience_s)
            process.kill()
            with suppress(BrokenPipeError):
                process.stdin.close()
        return [process.returncode for process in processes]

    def _start(self) -> None:
        build_ops()
        self._logs, port = _make_folder(self._tmp_path, {}), free_port()
        for rank in range(self._world_size):
            env = _environment(rank, self._world_size, port, self._device)
            log = self._logs / f"rank{rank}.log"
            self._processes.append(_start(env, log, self._imports))


def run_ranks(
    function, world_size: int, tmp_path: Path, imports: str = FIRST_ENGINE, **arguments
) -> list:
    """Run a function on ranks of its own, which are gone afterwards; see `StandingRanks`.

    For what needs processes that have done nothing before; most tests take the fixture
    `standing_ranks`.
    """
    ranks = StandingRanks(world_size, tmp_path, imports=imports)
    try:
        return ranks.run(function, **arguments)
    finally:
        ranks.close(patience_s=10)


def on_ranks(world_size: int, timeout_s: float = 180, device: str = "cpu") -> Callable:
    """Make a test of a function that every rank of `standing_ranks` runs, and that asserts."""

    def make(function: Callable) -> Callable:
        @functools.wraps(function)
        def test(standing_ranks=None, **arguments):
            if standing_ranks is None:  # on a rank
                function(**arguments)
            else:
                standing_ranks(world_size, device).run(test, timeout_s, **arguments)

        taken = inspect.signature(function).parameters.values()
        own = inspect.Parameter("standing_ranks", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature([*taken, own])
        return test

    return make


_job: Path | None = None  # the folder of the function that this rank runs


def report(result) -> None:
    """Hand a rank's result over, once; a function that just returns need not call it."""
    _save(result, _job)


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
    # Here, because the time limits of ranks are for what they test.
    from deepspeed.ops.op_builder import CPUAdamBuilder

    from zero8.op import kernel

    kernel.module()
    CPUAdamBuilder().load(verbose=False)


def _environment(rank: int, world_size: int, port: int, device: str) -> dict[str, str]:
    # Without LOCAL_SIZE DeepSpeed's all_reduce over shared memory stays off: it would leave 66 MiB
    # per rank and run in /dev/shm, which is memory.
    env = {name: value for name, value in os.environ.items() if name != "LOCAL_SIZE"} | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": device,
        "PYTHONPATH": os.pathsep.join(filter(None, (*FOLDERS, os.environ.get("PYTHONPATH")))),
    }
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # for what runs without DeepSpeed
    return env


@lru_cache(maxsize=2)
def _server(imports: str) -> Forks:
    # Frozen: DeepSpeed's collections, and ours, look at what came later only.
    before = f"import ranks, {imports}, gc; ranks.describe_cpu(); gc.freeze()" if imports else ""
    return Forks(None, before, _environment(0, 1, 0, "cpu"))


def describe_cpu() -> None:
    """Find out once, for all forks, what DeepSpeed asks whenever it loads an op, for a second."""
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()


def _start(env: dict[str, str], log: Path, imports: str) -> Fork:
    """Start a rank on the jobs (module, function, folder) that its stdin will name."""
    jobs, stdin = os.pipe()
    with open(jobs) as file, open(log, "w") as out:
        rank = _server(imports).fork("import ranks; ranks.serve()", [], env, (file, out, out))
    rank.stdin = os.fdopen(stdin, "wb")
    return rank


def error_of(function, *args, **kwargs) -> tuple[str, str] | None:
    """Return the type and text of what a call raises, None if it returns.

    Any: one that ended this rank would leave the others waiting for it.
    """
    try:
        function(*args, **kwargs)
    except BaseException as error:  # DCP raises what is no Exception
        return type(error).__name__, str(error)
    return None


def _wait(processes: list, logs: Path, timeout_s: float, results: list[Path]) -> None:
    """Wait until the results of all processes are there."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if any(process.poll() is not None for process in processes):
            break
        if all(path.exists() for path in results):
            return
        time.sleep(0.01)
    # A rank that died takes the others along: blame the first that ended by itself.
    for rank, process in enumerate(processes):
        if process.poll() is not None:
            raise AssertionError(f"rank {rank}: exit status {process.poll()}\n{_log(logs, rank)}")
    for process in processes:
        os.kill(process.pid, STACKS)
    time.sleep(1)
    texts = [f"rank {rank}: time limit\n{_log(logs, rank)}" for rank in range(len(processes))]
    raise AssertionError("\n".join(texts))


def _log(logs: Path, rank: int) -> str:
    """Return the end of what a rank has printed."""
    return (logs / f"rank{rank}.log").read_text()[-6000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve() -> None:
    """Be a rank: run the functions that stdin names, a line each."""
    global _job
    faulthandler.register(STACKS)
    for line in sys.stdin:
        module, name, folder = line.rstrip("\n").split(" ", 2)
        _job = Path(folder)
        kwargs = torch.load(_job / "kwargs.pt", weights_only=False)
        _save(getattr(importlib.import_module(module), name)(**kwargs), _job)
        gc.collect()  # the engines of this function, which are in cycles
    # Interpreter shutdown with live gloo threads can hang; the results are on disk.
    sys.stdout.flush()
    os._exit(0)
