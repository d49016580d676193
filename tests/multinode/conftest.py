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
    """The two hosts, both up before and after."""
    yield shared_lab
    for host in shared_lab.hosts:
        shared_lab.restore(host)


@pytest.fixture
def cluster(lab):
    """Slurm on both hosts."""
    need(slurm.missing())
    running = slurm.Slurm(lab)
    yield running
    running.close()


@pytest.fixture
def job(lab, request):
    """Return a function that starts a job: a launcher, number of hosts, words and environment."""
    jobs = []

    def start(launcher: str, hosts: int, *words: object, **env: str) -> Job:
        cluster = request.getfixturevalue("cluster") if launcher == "slurm" else None
        jobs.append(Job(lab, cluster, launcher, hosts, *words, **env))
        return jobs[-1]

    yield start
    for one in jobs:
        one.close()
