# SPDX-License-Identifier: Apache-2.0
"""Jobs of two ranks that resume, take a step and save, with a SIGKILL at a chosen write.

A server process imports what takes seconds, once, and forks the ranks of each job.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import xxhash
from places import FOLDERS

RANKS = 2


class Server:
    """Runs jobs one after another; see `job`."""

    def __init__(self):
        from ranks import build_ops

        build_ops()
        # As ranks.py does it.
        env = {name: value for name, value in os.environ.items() if name != "LOCAL_SIZE"} | {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join(filter(None, (*FOLDERS, os.environ.get("PYTHONPATH")))),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import fault_worker; fault_worker.serve()"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def run(self, **job) -> dict:
        """Run a job; return the ranks' statuses, what they noted, and the seconds it took."""
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the server and all that it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def serve() -> None:
    """Fork the ranks of the jobs that stdin names, a line of JSON each, and answer in JSON."""
    # What takes seconds: all that the first engine of a process imports.
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import zero_worker  # noqa: F401
    from ranks import free_port

    for line in sys.stdin:
        kwargs = json.loads(line)
        timeout_s, port, began = kwargs.pop("timeout_s"), free_port(), time.monotonic()
        folder = Path(kwargs["folder"])
        folder.mkdir(exist_ok=True)
        children = {}
        for rank in range(RANKS):
            folder.joinpath(f"rank{rank}.json").unlink(missing_ok=True)
            if (pid := os.fork()) == 0:
                be_rank(rank, port, kwargs)
            children[rank] = pid
        statuses = {}
        while len(statuses) < RANKS:
            if time.monotonic() - began > timeout_s:
                for rank in set(children) - set(statuses):
                    os.kill(children[rank], signal.SIGKILL)
                timeout_s = 1e9
                statuses |= dict.fromkeys(set(children) - set(statuses), "time limit")
            for rank, pid in children.items():
                if rank not in statuses and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    statuses[rank] = os.waitstatus_to_exitcode(ended[1])
            time.sleep(0.01)
        notes = [folder / f"rank{rank}.json" for rank in range(RANKS)]
        answer = {
            "statuses": [statuses[rank] for rank in range(RANKS)],
            "notes": [json.loads(p.read_text()) if p.exists() else {} for p in notes],
            "seconds": time.monotonic() - began,
        }
        print(json.dumps(answer), flush=True)


def be_rank(rank: int, port: int, kwargs: dict) -> None:
    """Be a rank of one job; never returns."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    log = os.open(f"{kwargs['folder']}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        job(rank, **kwargs)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(3)
    os._exit(0)


def job(rank, folder, ds_config, steps=1, kill=None, tag=None):
    """Load the checkpoint that is there, note it, take steps, save after each.

    Args:
        rank: of this process.
        folder: for notes, and of the folder of checkpoints.
        ds_config: for the engine.
        steps: to take.
        kill: (rank, number): which rank is killed just before which write of its saves.
        tag: to save under; None for one of each step.
    """
    from zero_worker import held, make_engine, train

    def note(**values):
        notes.update(values)
        Path(folder, f"rank{rank}.json").write_text(json.dumps(notes))

    notes = {}
    note(stage="start")
    engine = make_engine(ds_config)
    engine.load_checkpoint(f"{folder}/checkpoints")
    first = engine.global_steps
    note(stage="loaded", first=first, held=[digest(held(engine))], losses=[])
    counter = Counter(kill[1] if kill and kill[0] == rank else -1)
    for step in range(first, first + steps):
        note(losses=notes["losses"] + train(engine, 1, first=step))
        note(held=notes["held"] + [digest(held(engine))], stage="saving")
        with killed_at(counter):
            engine.save_checkpoint(f"{folder}/checkpoints", tag=tag)
    note(stage="saved", writes=counter.count)


def digest(thing) -> str:
    """Return a hash of a nest of containers, tensors and values."""
    state = xxhash.xxh3_128()

    def add(value):
        if isinstance(value, torch.Tensor):
            state.update(
                value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, dict):
            for key in value:
                add(key)
                add(value[key])
        elif isinstance(value, list | tuple):
            for inner in value:
                add(inner)
        else:
            state.update(repr(value).encode())

    add(thing)
    return state.hexdigest()


class Counter:
    """Counts writes, and kills this process before the one with a number."""

    def __init__(self, deadly):
        self.count, self._deadly = 0, deadly

    def at_write(self, before_dying=lambda: None):
        """Note that a write comes."""
        if self.count == self._deadly:
            before_dying()
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


WRITES = ((os, "replace"), (os, "fsync"), (os, "unlink"), (os, "mkdir"), (shutil, "copyfile"))


@contextmanager
def killed_at(counter):
    """Count what writes in the block; a file of torch.save counts thrice: before, half, whole."""
    patches = [patch.object(torch, "save", counted_file(counter, torch.save))]
    patches += [patch.object(o, name, counted(counter, getattr(o, name))) for o, name in WRITES]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def counted(counter, original):
    def call(*args, **kwargs):
        counter.at_write()
        return original(*args, **kwargs)

    return call


def counted_file(counter, original):
    def save(thing, path, *args, **kwargs):
        counter.at_write()
        original(thing, path, *args, **kwargs)
        counter.at_write(lambda: os.truncate(path, os.path.getsize(path) // 2))
        counter.at_write()

    return save
