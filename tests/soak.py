# SPDX-License-Identifier: Apache-2.0
"""Kills trainings at random, resumes them, and compares them with undisturbed ones.

    make soak KILLS=100 SEED=0

Each training is resumed after every kill.  When it is through, every code, scale and weight of its
last checkpoint must be those of a training that nobody disturbed.  Not a part of the
tests: 100 kills take three quarters of an hour.  Prints a line per kill; exits with 1 if something
went wrong.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import psutil

from zero8.checkpoint.commands import diff
from zero8.checkpoint.read.open import open_checkpoint
from zero8.files.tags import complete_tags, verify

ROOT = Path(__file__).resolve().parent.parent
OPTIMIZER = "Adam8bitBlockwise"
MODES = ("zero2_offload.json", "zero3_nvme.json", "fsdp2_offload.toml")
SAME = "the bits of an undisturbed run"
STEPS, EVERY = 40, 2
JOB_SECONDS = 300  # a job that lasts longer hangs
LATEST_S = 6.0  # after the ranks have begun to train, that kills come


def checkpoints(folder: Path) -> Path:
    return folder / "out" / f"{OPTIMIZER}.checkpoint"


def config_in(folder: Path, mode: str) -> Path:
    """Return a config, of ZeRO-3 with a swap folder of its own."""
    path = ROOT / "configs" / mode
    if "nvme" not in mode:
        return path
    config = json.loads(path.read_text())
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(folder / "swap")
    (folder / mode).write_text(json.dumps(config))
    return folder / mode


@contextmanager
def job_in(folder: Path, mode: str):
    """Start two ranks that go on from the newest checkpoint; kill them at the end of the block."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", 2, "-m", "examples.gpt", "--steps", STEPS, "--resume"]
    command += ["--save-every", EVERY, "--data", ROOT / "zero8" / "spec", "--out", folder / "out"]
    command += ["--config", config_in(folder, mode)]
    with open(folder / "log", "w") as log:
        job = subprocess.Popen([str(word) for word in command], cwd=ROOT, stdout=log, stderr=log)
    try:
        yield job
    finally:
        kill(processes_of(job))
        job.wait(30)


def processes_of(job: subprocess.Popen) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(job.pid)
        return [launcher, *launcher.children(recursive=True)]
    return []


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def wait_until_ranks_train(job: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + JOB_SECONDS
    while job.poll() is None and "go on from" not in log.read_text():
        if time.monotonic() > deadline:
            raise RuntimeError(f"has not begun within {JOB_SECONDS} s: {log.read_text()}")
        time.sleep(0.05)


def disturbed(folder: Path, mode: str, chance: random.Random) -> bool:
    """Run a job, and kill its ranks; return whether it was through before."""
    log = folder / "log"
    with job_in(folder, mode) as job:
        wait_until_ranks_train(job, log)
        if chance.random() < 0.5:  # in a save: a tag that is new is not complete yet
            known = set(checkpoints(folder).glob("*"))
            while job.poll() is None and set(checkpoints(folder).glob("*")) <= known:
                time.sleep(0.002)
            time.sleep(chance.choice([0.0, 0.01, 0.05, 0.1]))
        else:
            time.sleep(chance.uniform(0, LATEST_S))
        kill(processes_of(job)[1:])  # as a power cut does; the launcher notices
        status = job.wait(JOB_SECONDS)
    for tag in complete_tags(checkpoints(folder)) if checkpoints(folder).exists() else []:
        verify(checkpoints(folder) / tag.name)
    if status and "go on from" not in log.read_text():
        raise RuntimeError(f"fails by itself: {log.read_text()}")
    return status == 0


def are_equal(folder: Path, expected: Path) -> bool:
    """Return whether the last checkpoints of two trainings are the same bits."""
    sides = (checkpoints(f) / complete_tags(checkpoints(f))[-1].name for f in (folder, expected))
    return diff.compare(*map(open_checkpoint, sides))["equal"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the job ends, too
    chance, kills, wrong = random.Random(given.seed), 0, 0
    with tempfile.TemporaryDirectory(prefix="zero8-soak-") as folder:
        for mode in MODES:
            with job_in(Path(folder, mode), mode) as job:
                assert job.wait(2 * JOB_SECONDS) == 0, Path(folder, mode, "log").read_text()
        for number in count():
            mode = MODES[number % len(MODES)]
            training = Path(folder, f"{number} {mode}")
            try:
                while not disturbed(training, mode, chance):
                    kills += 1
                    print(f"{training.name}: kill {kills}", flush=True)
                found = SAME if are_equal(training, Path(folder, mode)) else "other bits"
            except (RuntimeError, ValueError, OSError, subprocess.TimeoutExpired) as error:
                found = f"{type(error).__name__}: {error}"
            print(f"{training.name}: {found}", flush=True)
            wrong += found != SAME
            if kills >= given.kills:
                break
    print(f"{kills} kills, {number + 1} trainings, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(main() > 0)
