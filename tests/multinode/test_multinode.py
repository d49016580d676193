# SPDX-License-Identifier: Apache-2.0
"""Each launcher on two hosts: trainings that resume on one, killed ranks, and lost hosts."""

import sys
import time
from contextlib import suppress

import psutil
import pytest
from jobs import LAUNCHERS

from zero8.files.tags import complete_tags
from zero8.op import build

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(1200)]

OPTIMIZER = "Adam8bitBlockwise"
EVERY = 2  # steps, a checkpoint
OF_DEEPSPEED = ("deepspeed", "openmpi")  # of the others FSDP2
START_S = 400  # a training starts, and ends, on a busy machine
KILLED_S = 60  # from a rank's end to the job's
# From the loss of a host to the job's end: ssh and Open MPI notice after 15 s, Slurm after the
# SlurmdTimeout of slurm.py and its next ping, DeepSpeed's ranks after the limit of loop.py.
# MPICH's mpirun does not end at all.
LOST_S = {"torchrun": 60, "deepspeed": 60, "openmpi": 60, "slurm": 180}


@pytest.fixture(scope="module", autouse=True)
def built():
    build.load()


@pytest.fixture
def out(lab):
    """A folder that all hosts see, and that goes with them."""
    return lab.folder / f"out-{time.monotonic_ns()}"


def training(launcher, out, steps):
    config = "zero2_offload.json" if launcher in OF_DEEPSPEED else "fsdp2_offload.toml"
    settings = ["--config", f"configs/{config}", "--data", "zero8/spec"]
    ends = ["--steps", steps, "--save-every", EVERY, "--out", out, "--resume"]
    return ["-m", "examples.gpt", *settings, *ends]


def saved_step(out):
    """Return the step of the newest complete checkpoint, 0 without one."""
    with suppress(FileNotFoundError):
        names = [tag.name for tag in complete_tags(out / f"{OPTIMIZER}.checkpoint")]
        steps = [name.removeprefix("global_").removeprefix("step") for name in names]
        return max((int(step) for step in steps if step.isdigit()), default=0)
    return 0


def kill_rank(lab, host):
    for process in lab.processes(host):
        with suppress(psutil.NoSuchProcess):
            if "RANK" in process.environ():
                process.kill()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_training_that_lost_a_rank_ends_and_resumes_on_one_host(lab, job, out, launcher):
    killed = job(launcher, 2, *training(launcher, out, 10_000))
    killed.wait_for(lambda: saved_step(out) >= EVERY)
    kill_rank(lab, "node1")
    assert killed.status(KILLED_S) != 0, killed.output()
    assert f"{OPTIMIZER}: 2 rank(s) go on from the start" in killed.output()
    step = saved_step(out)
    resumed = job(launcher, 1, *training(launcher, out, step + EVERY))
    assert resumed.status(START_S) == 0, resumed.output()
    assert f"{OPTIMIZER}: 1 rank(s) go on from step {step} of {step + EVERY}" in resumed.output()
    assert saved_step(out) == step + EVERY


@pytest.mark.parametrize("launcher", LOST_S)
def test_job_that_lost_a_host_ends(lab, job, launcher):
    lost = job(launcher, 2, "tests/multinode/loop.py", SBATCH_NO_REQUEUE="1")
    lost.wait_for(lambda: "step 3\n" in lost.output().replace("\r", ""))
    lab.power_off("node1")
    assert lost.status(LOST_S[launcher]) != 0, lost.output()


@pytest.mark.parametrize(
    ("launcher", "env"),
    [("torchrun", {"LAUNCHER_ARGS": "--max-restarts 4"}), ("slurm", {"RESTARTS": "1"})],
    ids=["torchrun", "slurm"],
)
def test_training_that_lost_a_rank_is_started_again(lab, job, out, launcher, env):
    late = lab.folder / "late_rank_0.sh"  # its peers must not find what it left in torchrun's store
    late.write_text(
        '#!/bin/sh\n[ "$RANK" != 0 ] || [ "$TORCHELASTIC_RESTART_COUNT" = 0 ] || sleep 8\n'
        f'exec {sys.executable} "$@"\n'
    )
    late.chmod(0o755)
    one = job(launcher, 2, *training(launcher, out, 40), PYTHON_EXEC=late, **env)
    one.wait_for(lambda: saved_step(out) >= EVERY)
    kill_rank(lab, "node1")
    assert one.status(START_S) == 0, one.output()
    assert f"{OPTIMIZER}: 2 rank(s) go on from step" in one.output()
    assert saved_step(out) == 40


def test_mpirun_starts_nothing_on_hosts_of_different_versions(lab, job):
    other = lab.folder / "node1.tmp" / "other" / "torch-9.9.dist-info"  # in /tmp of this host alone
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Name: torch\nVersion: 9.9\n")
    one = job("openmpi", 2, "tests/multinode/loop.py", PYTHONPATH="/tmp/other")
    assert one.status(START_S) != 0
    assert "hosts differ in torch" in one.output()
    assert "step 0" not in one.output()
