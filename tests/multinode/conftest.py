# SPDX-License-Identifier: Apache-2.0
"""Hosts for tests, and jobs on them that are gone at the end of the test."""

import pytest
import slurm
from jobs import Job
from lab import Lab, missing
from needs import need


@pytest.fixture(scope="session")
def shared_lab():
    """Two hosts; a test that turns one off turns it on again."""
    need(missing())
    lab = Lab(2)
    yield lab
    lab.close()


@pytest.fixture
def lab(shared_lab):
    """The two hosts, both up and connected before and after."""
    yield shared_lab
    for host in shared_lab.hosts:
        shared_lab.restore(host)


@pytest.fixture
def four_hosts():
    """Four hosts of one test."""
    need(missing())
    lab = Lab(4)
    yield lab
    lab.close()


@pytest.fixture
def four_host_job(four_hosts):
    """Return a function that starts ranks on the four hosts by launch/deepspeed.sh."""
    jobs = []

    def start(*arguments: object, **env: str) -> Job:
        jobs.append(Job(four_hosts, "deepspeed.sh", list(map(str, arguments)), env))
        return jobs[-1]

    yield start
    for one in jobs:
        one.close()


@pytest.fixture
def cluster(lab):
    """Slurm on both hosts."""
    need(slurm.missing())
    running = slurm.Slurm(lab)
    yield running
    running.close()


@pytest.fixture
def job(lab, request):
    """Return a function that starts a launcher of launch/ on a host."""
    jobs = []

    def start(script: str, *arguments: object, host: str = "node0", **env: str) -> Job:
        cluster = request.getfixturevalue("cluster") if script == "slurm.sbatch" else None
        jobs.append(Job(lab, script, list(map(str, arguments)), env, host, cluster))
        return jobs[-1]

    yield start
    for one in jobs:
        one.close()
