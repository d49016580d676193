# SPDX-License-Identifier: Apache-2.0
"""Disturbs trainings at random, resumes them, and compares them with undisturbed ones.

    make soak KILLS=100 SEED=0

Each training is resumed after every kill.  When it is through, its loss and every code, scale and
weight of its last checkpoint must be those of a training that nobody disturbed.  Not a part of the
tests: 100 kills take three quarters of an hour.  Prints a line per kill; exits with 1 if something
went wrong.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from zero8.files.tags import complete_tags, verify

ROOT = Path(__file__).resolve().parent.parent
OPTIMIZER = "Adam8bitBlockwise"
STEPS, EVERY = 40, 2
MOST_WITHOUT_PROGRESS = 12  # kills
JOB_SECONDS = 300  # a job that lasts longer hangs
LATEST_S = 6.0  # after the ranks have begun to train, that kills come

Processes = list[psutil.Process]


# --- What is disturbed ---------------------------------------------------------------------------


class Training:
    """A training in a folder of its own, started again until it is through."""

    def __init__(self, mode: str, folder: Path):
        self.mode, self.folder = mode, folder
        folder.mkdir()
        self.checkpoints = folder / "out" / f"{OPTIMIZER}.checkpoint"
        self.log = folder / "log"
        self.seen: list[str] = []  # the newest complete tag after each kill

    def command(self) -> list[str]:
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        settings = ["--steps", STEPS, "--save-every", EVERY, "--data", ROOT / "zero8" / "spec"]
        out = ["--out", self.folder / "out", "--resume"]
        words = ["--nproc-per-node", 2, "-m", "examples.gpt", *settings, *out, *self._engine()]
        return ranks + [str(word) for word in words]

    def _engine(self) -> list:
        if self.mode == "fsdp2":
            return ["--config", ROOT / "configs" / "fsdp2_offload.toml"]
        config = json.loads((ROOT / "configs" / f"{self.mode}.json").read_text())
        offload = config["zero_optimization"]["offload_optimizer"]
        if "nvme_path" in offload:
            offload["nvme_path"] = str(self.folder / "swap")
        path = self.folder / "config.json"
        path.write_text(json.dumps(config))
        return ["--config", path]

    def start(self) -> subprocess.Popen:
        with open(self.log, "w") as file:
            return subprocess.Popen(
                self.command(), cwd=ROOT, stdout=file, stderr=file, start_new_session=True
            )

    def check_tags(self) -> None:
        """Raise ValueError unless whatever looks complete is, and there is more now and then."""
        tags = complete_tags(self.checkpoints) if self.checkpoints.exists() else []
        for tag in tags:
            verify(self.checkpoints / tag.name)
        self.seen.append(tags[-1].name if tags else "nothing")
        last = self.seen[-MOST_WITHOUT_PROGRESS:]
        if len(last) == MOST_WITHOUT_PROGRESS and len(set(last)) == 1:
            raise ValueError(f"does not get on from {self.seen[-1]}: {self.log.read_text()}")

    def progress(self) -> str:
        return f"has {self.seen[-1]}"

    def loss(self) -> float | None:
        """Return the loss at the end, None if it was killed between the last save and that."""
        path = self.folder / "out" / f"{OPTIMIZER}.json"
        return json.loads(path.read_text())["val_loss"] if path.exists() else None

    def last_tag(self) -> Path:
        return self.checkpoints / complete_tags(self.checkpoints)[-1].name


def ranks_of(job: subprocess.Popen) -> Processes:
    with suppress(psutil.NoSuchProcess):
        everyone = psutil.Process(job.pid).children(recursive=True)
        return [p for p in everyone if p.is_running() and "examples.gpt" in p.cmdline()]
    return []


def end(job: subprocess.Popen) -> None:
    """Kill a job with all that it has started, at once, as a power cut does."""
    started: Processes = []
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(job.pid).children(recursive=True)
    job.kill()
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(started, timeout=30)
    job.wait(30)


# --- How -----------------------------------------------------------------------------------------


def kill_rank(training: Training, job: subprocess.Popen, chance: random.Random) -> None:
    time.sleep(chance.uniform(0, LATEST_S))
    _kill_one(job, chance)


def kill_rank_in_a_save(training: Training, job: subprocess.Popen, chance: random.Random) -> None:
    """Wait for a tag that is new, and so not complete yet."""
    known = _tags(training)
    deadline = time.monotonic() + JOB_SECONDS
    while job.poll() is None and _tags(training) <= known and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(chance.choice([0.0, 0.01, 0.05, 0.1]))
    _kill_one(job, chance)


def cut_power(training: Training, job: subprocess.Popen, chance: random.Random) -> None:
    time.sleep(chance.uniform(0, LATEST_S))
    end(job)


def interrupt(training: Training, job: subprocess.Popen, chance: random.Random) -> None:
    time.sleep(chance.uniform(0, LATEST_S))
    job.send_signal(chance.choice([signal.SIGINT, signal.SIGTERM]))


def _kill_one(job: subprocess.Popen, chance: random.Random) -> None:
    if ranks := ranks_of(job):
        with suppress(psutil.NoSuchProcess):
            chance.choice(ranks).kill()


def _tags(training: Training) -> set[str]:
    return {path.name for path in training.checkpoints.glob("*step*")}


WAYS: dict[str, Callable] = {
    "a rank": kill_rank,
    "a rank in a save": kill_rank_in_a_save,
    "all at once": cut_power,
    "signal": interrupt,
}
MODES = ("zero2_offload", "zero3_nvme", "fsdp2")


def disturbed_once(training: Training, chance: random.Random) -> str | None:
    """Run a job and disturb it; return how, or None if it was through before.

    Raises:
        RuntimeError: if the job hangs, or fails by itself.
    """
    way = chance.choice(list(WAYS))
    job, log = training.start(), training.log
    try:
        deadline = time.monotonic() + JOB_SECONDS
        while "go on from" not in log.read_text() and job.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"has not begun within {JOB_SECONDS} s: {log.read_text()}")
            time.sleep(0.05)
        if job.poll() is None:
            WAYS[way](training, job, chance)
        try:
            status = job.wait(JOB_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"did not end after {way}: {log.read_text()}") from None
    finally:
        end(job)
    training.check_tags()
    if status == 0:
        return None
    said = log.read_text()
    if "go on from" not in said:
        raise RuntimeError(f"fails by itself: {said}")
    return way


# --- The whole -----------------------------------------------------------------------------------


def undisturbed(mode: str, folder: Path) -> Training:
    training = Training(mode, folder)
    job, log = training.start(), training.log
    try:
        if job.wait(2 * JOB_SECONDS):
            raise RuntimeError(f"{mode}: fails without being disturbed: {log.read_text()}")
    finally:
        end(job)
    return training


def differences(found: Training, expected: Training) -> str:
    """Return what differs between two trainings that are through, "" if nothing does."""
    if found.loss() not in (expected.loss(), None):
        return f"loss {found.loss()!r}, expected {expected.loss()!r}"
    tags = [str(training.last_tag()) for training in (found, expected)]
    command = [sys.executable, "-m", "zero8.cli", "checkpoint", "diff", *tags]
    compared = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return compared.stdout + compared.stderr if compared.returncode else ""


def soak(kills: int, chance: random.Random, folder: Path) -> int:
    """Return how often something went wrong."""
    expected = {mode: undisturbed(mode, folder / f"{mode} undisturbed") for mode in MODES}
    ways, wrong, number = Counter(), 0, 0
    while ways.total() < kills:
        mode = MODES[number % len(MODES)]
        training = Training(mode, folder / f"{mode} {number}")
        number += 1
        try:
            while (way := disturbed_once(training, chance)) is not None:
                ways[f"{mode}: {way}"] += 1
                print(f"{ways.total()}: {mode}: {way}; {training.progress()}", flush=True)
            difference = differences(training, expected[mode])
        except (RuntimeError, ValueError, OSError) as error:
            difference = f"{type(error).__name__}: {error}"
        wrong += bool(difference)
        print(
            f"{training.folder.name}: {difference or 'the bits of an undisturbed run'}", flush=True
        )
        shutil.rmtree(training.folder)
    for name, count in sorted(ways.items()):
        print(f"{name:40} {count}")
    print(f"{ways.total()} kills, {number} trainings, {wrong} wrong")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the job ends, too
    with tempfile.TemporaryDirectory(prefix="zero8-soak-") as folder:
        return soak(given.kills, random.Random(given.seed), Path(folder)) != 0


if __name__ == "__main__":
    sys.exit(main())
