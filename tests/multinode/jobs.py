# SPDX-License-Identifier: Apache-2.0
"""Jobs on the hosts of a lab, started by the launchers of launch/."""

import shutil
import subprocess
import sys
import time
from contextlib import suppress

import psutil
from lab import REPOSITORY, Lab
from slurm import Slurm

LAUNCHERS = {
    "torchrun": ("torchrun.sh", {}),
    "deepspeed": ("deepspeed.sh", {}),
    "openmpi": ("mpirun.sh", {"MPIRUN": "mpirun.openmpi"}),
    "mpich": ("mpirun.sh", {"MPIRUN": "mpirun.mpich", "CHECK": "0"}),
    "slurm": ("slurm.sbatch", {}),
}
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHON": sys.executable,
    "PYTHONPATH": str(REPOSITORY),  # the checkout's packages, which need not be installed
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


class Job:
    """A launcher that was started on the first host, with a rank on each of the first `hosts`."""

    def __init__(self, lab: Lab, slurm: Slurm | None, launcher: str, hosts: int, *words, **env):
        """Start a script of launch/ with words behind it; with Slurm, submit it."""
        self._lab = lab
        self._may_stay = Slurm.PROGRAMS if slurm else ()
        self._folder = lab.folder / f"job-{time.monotonic_ns()}"
        self._folder.mkdir()
        hostfile = self._folder / "hostfile"
        hostfile.write_text("".join(f"{host} slots=1\n" for host in lab.hosts[:hosts]))
        # What the launcher prints, and what Slurm writes for it.
        self._logs = [self._folder / "log", self._folder / "slurm.out"]
        script, settings = LAUNCHERS[launcher]
        command = [str(REPOSITORY / "launch" / script), *map(str, words)]
        settings = {**SETTINGS, "HOSTFILE": str(hostfile), **settings, **env}
        if slurm:
            options = ["--wait", f"--nodes={hosts}", f"--output={self._logs[1]}"]
            command = ["sbatch", *options, *command]
            settings |= slurm.env
        self.process = lab.start(lab.hosts[0], command, self._logs[0], **settings)

    def output(self) -> str:
        """Return what was printed so far."""
        return "".join(log.read_text(errors="replace") for log in self._logs if log.exists())

    def wait_for(self, condition, timeout_s: float = 400) -> None:
        """Wait until a function returns something true, while the job runs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def status(self, timeout_s: float) -> int:
        """Wait for the end; return the exit status, when no process is left on any host."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"running after {timeout_s} s:\n{self.output()}") from None
        deadline = time.monotonic() + 60
        while left := self._left():
            assert time.monotonic() < deadline, f"left over: {left}\n{self.output()}"
            time.sleep(0.2)
        return status

    def _left(self) -> list[str]:
        """Return a line for each process on a host, but for Slurm's own."""
        lines = []
        for host in self._lab.hosts:
            for process in self._lab.processes(host):
                with suppress(psutil.NoSuchProcess):
                    if process.name() not in self._may_stay:
                        lines.append(f"{host}: {process.pid} {process.cmdline()}")
        return lines

    def close(self) -> None:
        """End everything and delete the folder."""
        self.process.kill()
        self.process.wait()
        for host in self._lab.hosts:
            for process in self._lab.processes(host):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
