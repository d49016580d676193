# SPDX-License-Identifier: Apache-2.0
"""Jobs of two ranks that resume, take a step and save, with a SIGKILL at a chosen write."""

import json
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import xxhash
from ranks import StandingRanks
from torch.utils._pytree import tree_flatten_with_path

RANKS = 2


def run(folder: Path, timeout_s: float, **kwargs) -> dict:
    """Run a job; return the ranks' statuses and what they noted."""
    notes = [folder / f"rank{rank}.json" for rank in range(RANKS)]
    for path in notes:
        path.unlink(missing_ok=True)
    folder.mkdir(exist_ok=True)
    statuses = StandingRanks(RANKS, folder).run_to_the_end(
        be_rank, timeout_s, folder=str(folder), **kwargs
    )
    return {
        "statuses": statuses,
        "notes": [json.loads(path.read_text()) if path.exists() else {} for path in notes],
    }


def be_rank(folder, **kwargs) -> None:
    """Be a rank of one job; never returns."""
    rank = int(os.environ["RANK"])
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        job(rank, folder, **kwargs)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(3)
    os._exit(0)


def job(rank, folder, ds_config, steps=1, kill=None):
    """Load the checkpoint that is there, note it, take steps, save after each."""
    from zero_worker import held, make_engine, train

    def note(**values):
        notes.update(values)
        Path(folder, f"rank{rank}.json").write_text(json.dumps(notes))

    notes = {}
    engine = make_engine(ds_config)
    engine.load_checkpoint(f"{folder}/checkpoints")
    first = engine.global_steps
    note(first=first, held=[digest(held(engine))], losses=[])
    counter = Counter(kill[1] if kill and kill[0] == rank else -1)
    for step in range(first, first + steps):
        note(losses=notes["losses"] + train(engine, 1, first=step))
        note(held=notes["held"] + [digest(held(engine))])
        with killed_at(counter):
            engine.save_checkpoint(f"{folder}/checkpoints")


def digest(thing) -> str:
    """Return a hash of a nest of containers, tensors and values."""
    state = xxhash.xxh3_128()
    for path, leaf in tree_flatten_with_path(thing)[0]:
        state.update(repr(path).encode())
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        state.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
    return state.hexdigest()


class Interrupted(BaseException):
    """Stands for the end of the process."""


class Counter:
    """Counts writes, and kills this process before the one with a number, or raises."""

    def __init__(self, deadly, kills=True):
        self.count, self._deadly, self._kills = 0, deadly, kills

    def at_write(self, before_dying=lambda: None):
        """Note that a write comes."""
        if self.count == self._deadly:
            before_dying()
            if not self._kills:
                raise Interrupted
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


WRITES = [(os, name) for name in ("replace", "fsync", "unlink", "rmdir", "mkdir")]
WRITES.append((shutil, "copyfile"))


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
