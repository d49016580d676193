# SPDX-License-Identifier: Apache-2.0
"""Hosts for tests, and jobs on them that are gone at the end of the test."""

import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from lab import REPOSITORY, Lab, missing
from needs import need

# Ranks that wait for others for longer end, and so do those without a sign of life.
TIMEOUT_S = 15
GRACE_S = 5


class Job:
    """A launcher that was started on a host.

    Attributes:
        run_dir: where the logs of its ranks are.
    """

    def __init__(self, lab: Lab, host: str, command: list[str], env: dict[str, str]):
        self._lab = lab
        self._folder = lab.folder / f"job-{time.monotonic_ns()}"
        self.run_dir = self._folder / "run"
        self._folder.mkdir()
        hostfile = self._folder / "hostfile"
        hostfile.write_text("".join(f"{host} slots=1\n" for host in lab.hosts[:2]))
        settings = {
            "HOSTFILE": str(hostfile),
            "RUN_DIR": str(self.run_dir),
            "TIMEOUT_S": str(TIMEOUT_S),
            "GRACE_S": str(GRACE_S),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            # The checkout's, which need not be installed; ranks get what begins with PYTHON.
            "PYTHONPATH": str(REPOSITORY),
        }
        self._began = time.monotonic()
        self._log = self._folder / "log"
        self.process = lab.start(host, command, self._log, **{**settings, **env})

    def output(self) -> str:
        """Return what was printed so far."""
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 150) -> None:
        """Wait until a text has been printed."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, f"no {text!r}:\n{self.output()}"
            time.sleep(0.1)

    def status(self, timeout_s: float = 180) -> int:
        """Wait for the end; return the exit status, when no process is left on any host."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s} s:\n{self.output()}")
        self._seconds = time.monotonic() - self._began
        self.assert_nothing_is_left()
        return status

    def assert_nothing_is_left(self, timeout_s: float = 2 * (TIMEOUT_S + GRACE_S)) -> None:
        """Wait until no host has a process of a job."""
        deadline = time.monotonic() + timeout_s
        while left := [(h, p) for h in self._lab.hosts for p in self._lab.processes(h)]:
            if time.monotonic() > deadline:
                pytest.fail(f"left over: {described(left)}\n{self.output()}")
            time.sleep(0.2)

    def close(self) -> None:
        """End everything and delete the folder."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for host in self._lab.hosts:
            for process in self._lab.processes(host):
                with suppress(Exception):
                    process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def described(processes: list) -> list[str]:
    """Return a line for each process."""
    lines = []
    for host, process in processes:
        with suppress(Exception):
            lines.append(f"{host}: {process.pid} {' '.join(process.cmdline())[:200]}")
    return lines


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
