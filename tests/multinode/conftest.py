# SPDX-License-Identifier: Apache-2.0
"""Hosts for tests, and jobs on them that are gone at the end of the test."""

from pathlib import Path

import pytest
from jobs import Job
from lab import REPOSITORY, Lab, missing
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
def job(lab):
    """Return a function that starts a launcher of launch/ on a host."""
    jobs = []

    def start(launcher: str, *arguments: object, host: str = "node0", **env: str) -> Job:
        script = Path(REPOSITORY, "launch", launcher)
        jobs.append(Job(lab, host, [str(script), *map(str, arguments)], env))
        return jobs[-1]

    yield start
    for one in jobs:
        one.close()
