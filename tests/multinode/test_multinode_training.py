# SPDX-License-Identifier: Apache-2.0
"""Trainings on two hosts: the loss of one host, also when a rank or a host is lost on the way."""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from lab import REPOSITORY
from ranks import free_port

from zero8.checkpoint.files.tags import complete_tags
from zero8.op import build

pytestmark = pytest.mark.multinode

STEPS = 6
EVERY = 2
OPTIMIZER = "Adam8bitBlockwise"
DATA = REPOSITORY / "zero8" / "spec"


def training(engine: str, out: Path, *arguments: object) -> list[str]:
    settings = ["--engine", engine, "--steps", STEPS, "--save-every", EVERY, "--data", DATA]
    return ["-m", "examples.gpt", *map(str, [*settings, "--out", out, *arguments])]


def loss(out: Path) -> float:
    return json.loads((out / f"{OPTIMIZER}.json").read_text())["val_loss"]


@pytest.fixture(scope="module", autouse=True)
def built():
    build.op().load()


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory):
    """Return a function: the loss of two ranks on this machine, by an engine's name."""

    @cache
    def of(engine):
        out = tmp_path_factory.mktemp(engine)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        subprocess.run(
            [*torchrun, "--master-port", str(free_port()), *training(engine, out)],
            cwd=REPOSITORY,
            env=cpu_only(),
            check=True,
            timeout=300,
        )
        return loss(out)

    return of


def cpu_only() -> dict[str, str]:
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def out(shared_lab):
    """A folder that all hosts see."""
    folder = shared_lab.folder / f"out-{time.monotonic_ns()}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


TRAININGS = {
    "deepspeed.sh": ("deepspeed.sh", "deepspeed", {}),
    "torchrun.sh, DeepSpeed": ("torchrun.sh", "deepspeed", {}),
    "torchrun.sh, FSDP2": ("torchrun.sh", "fsdp2", {}),
    "mpirun.sh, Open MPI": ("mpirun.sh", "deepspeed", {"MPIRUN": "mpirun.openmpi"}),
    "slurm.sbatch": ("slurm.sbatch", "fsdp2", {}),
    "slurm.sbatch, torchrun": ("slurm.sbatch", "fsdp2", {"TORCHRUN": "1"}),
    "mpirun.sh, MPICH": ("mpirun.sh", "fsdp2", {"MPIRUN": "mpirun.mpich", "CHECK": "0"}),
}


@pytest.mark.parametrize(("script", "engine", "env"), TRAININGS.values(), ids=TRAININGS)
def test_training_on_two_hosts_has_the_loss_of_one_host(job, out, on_one_host, script, engine, env):
    one = job(script, *training(engine, out), **env)
    assert one.status(timeout_s=300) == 0, one.output()
    assert loss(out) == on_one_host(engine)
    if script == "mpirun.sh" and "CHECK" not in env:  # the table that mpi4py has gathered
        assert "kernel for" in one.output()


def wait_for_step(job, out: Path, step: int) -> None:
    """Wait until a checkpoint of a step is complete."""
    deadline = time.monotonic() + 200
    folder = out / f"{OPTIMIZER}.checkpoint"
    while not any(saved >= step for saved in saved_steps(folder)):
        assert job.process.poll() is None, job.output()
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.05)


def saved_steps(folder: Path) -> list[int]:
    with suppress(FileNotFoundError):
        names = [tag.name for tag in complete_tags(folder) if not tag.name.endswith("_universal")]
        return [int(name.removeprefix("global_").removeprefix("step")) for name in names]
    return []


def kill_training(lab, host: str) -> None:
    for process in lab.processes(host):
        if any(word.endswith("/run_script.py") for word in process.cmdline()):
            process.kill()


def steps_gone_on_from(output: str, ranks: int) -> list[int]:
    """Return the steps from which so many ranks went on, in their order."""
    words = f"{OPTIMIZER}: {ranks} rank(s) go on from step "
    return [int(part.split()[0]) for part in output.split(words)[1:]]


@pytest.mark.parametrize("script", ["deepspeed.sh", "torchrun.sh"])
def test_training_that_lost_a_rank_goes_on_to_the_loss_of_an_undisturbed_one(
    lab, job, out, on_one_host, script
):
    """torchrun starts the ranks again by itself; DeepSpeed's command is given a second time."""
    one = job(script, *training("deepspeed", out, "--resume"), RESTARTS="4", JOIN_S="60")
    wait_for_step(one, out, EVERY)
    kill_training(lab, "node1")
    status = one.status(timeout_s=300)
    if script == "deepspeed.sh":
        assert status != 0
        one = job(script, *training("deepspeed", out, "--resume"))
        status = one.status(timeout_s=300)
    assert status == 0, one.output()
    assert steps_gone_on_from(one.output(), ranks=2)[-1] >= EVERY, one.output()
    assert loss(out) == on_one_host("deepspeed")


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_training_goes_on_with_one_host_and_with_two_again(lab, job, out, engine):
    elastic = {"MIN_HOSTS": "1", "RESTARTS": "9", "JOIN_S": "30"}
    arguments = training(engine, out, "--resume", "--steps", 10_000)
    port = {"MASTER_PORT": "29400", "RUN_DIR": str(out / "logs" / "elastic")}
    one = job("torchrun.sh", *arguments, **elastic, **port)
    wait_for_step(one, out, EVERY)
    lab.power_off("node1")
    one.wait_for("1 rank(s) go on from step", timeout_s=200)
    alone_from = steps_gone_on_from(one.output(), ranks=1)[0]
    wait_for_step(one, out, alone_from + EVERY)
    lab.restore("node1")
    again = {**elastic, "RENDEZVOUS": "node0:29400", "RUN_ID": "elastic", "HOSTS": "2"}
    back = job("torchrun.sh", *arguments, host="node1", **again, NAMES="node0,node1")
    one.wait_for("2 rank(s) go on from step", timeout_s=200)
    together_from = steps_gone_on_from(one.output(), ranks=2)[-1]
    assert together_from >= alone_from + EVERY
    wait_for_step(one, out, together_from + EVERY)
    for running in (one, back):
        running.process.terminate()
