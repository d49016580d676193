# SPDX-License-Identifier: Apache-2.0
"""Jobs on the hosts of a lab, started by the launchers of launch/."""

import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
from lab import REPOSITORY, Lab
from slurm import Slurm

LOOP = "tests/multinode/loop.py"
LAUNCHERS = {
    "deepspeed": ("deepspeed.sh", {}),
    "torchrun": ("torchrun.sh", {}),
    "openmpi": ("mpirun.sh", {"MPIRUN": "mpirun.openmpi", "CHECK": "0"}),
    "mpich": ("mpirun.sh", {"MPIRUN": "mpirun.mpich", "CHECK": "0"}),
    "slurm": ("slurm.sbatch", {}),
}
# The launcher's own program that stays on a host that is cut off, until TCP gives up (a quarter of
# an hour), or it is connected again.
STAYS_WHERE_CUT_OFF = {"slurm": "slurmstepd"}
OVER_SSH = tuple(name for name in LAUNCHERS if name != "slurm")
# Ranks that wait for others for longer end, and so do those without a sign of life.
TIMEOUT_S = 15
GRACE_S = 5


class Job:
    """A launcher that was started on a host.

    Attributes:
        run_dir: where the logs of its ranks are.
    """

    def __init__(
        self,
        lab: Lab,
        script: str,
        arguments: list[str],
        env: dict[str, str],
        host: str = "node0",
        slurm: Slurm | None = None,
    ):
        """Start a script of launch/; one of Slurm's is submitted to `slurm`."""
        self._lab = lab
        self._may_stay = set(slurm.PROGRAMS) if slurm else set()
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
        command = [str(REPOSITORY / "launch" / script), *arguments]
        # What the launcher prints, and what Slurm writes for it.
        self._logs = [self._folder / "log", self._folder / "slurm.out"]
        if slurm:
            # Slurm takes the words before the script for its own, and its Python from PATH.
            settings["PYTHON"] = sys.executable
            command = ["sbatch", "--wait", f"--output={self._logs[1]}", *command]
            env = {**env, **slurm.env}
        self.process = lab.start(host, command, self._logs[0], **{**settings, **env})

    def output(self) -> str:
        """Return what was printed so far."""
        return "".join(log.read_text(errors="replace") for log in self._logs if log.exists())

    def wait_for(self, text: str, timeout_s: float = 150) -> None:
        """Wait until a text has been printed."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, f"no {text!r}:\n{self.output()}"
            time.sleep(0.1)

    def status(self, timeout_s: float = 180, may_stay: str = "") -> int:
        """Wait for the end; return the exit status, when no process is left on any host.

        Args:
            timeout_s: for the launcher to end.
            may_stay: the name of a program that may be left.
        """
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"running after {timeout_s} s:\n{self.output()}") from None
        self.assert_nothing_is_left(may_stay)
        return status

    def assert_nothing_is_left(self, may_stay: str = "") -> None:
        """Wait until no host has a process of a job, but for one program and Slurm's own."""
        allowed = {may_stay, *self._may_stay}
        deadline = time.monotonic() + 2 * (TIMEOUT_S + GRACE_S)
        while left := [
            line
            for host in self._lab.hosts
            for line in described(host, self._lab.processes(host), allowed)
        ]:
            if time.monotonic() > deadline:
                raise AssertionError(f"left over: {left}\n{self.output()}")
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


def described(host: str, processes: list[psutil.Process], allowed: set[str]) -> list[str]:
    """Return a line for each process of another name than these."""
    lines = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.name() not in allowed:
                lines.append(f"{host}: {process.pid} {' '.join(process.cmdline())[:200]}")
    return lines
