# SPDX-License-Identifier: Apache-2.0
"""Slurm on the hosts of a lab: a controller on the first, a daemon on each."""

import os
import shutil
import subprocess
import time
from contextlib import suppress

from lab import Lab, packages_without, which

TOOLS = {"slurmctld": "slurm-wlm", "munged": "munge"}

# A job that is submitted again waits until the credential of the first has expired.
# task/none and linuxproc need no control groups; munge's socket is on the disk that hosts share.
SLURM_CONF = """
ClusterName=lab
SlurmctldHost={first}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdTimeout=15
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdParameters=config_overrides
NodeName={names} CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return what this machine lacks for Slurm, None if it is nothing."""
    lacking = packages_without(TOOLS)
    return f"no Slurm: apt-get install {lacking}" if lacking else None


class Slurm:
    """A cluster of all hosts of a lab; commands find it by `env`."""

    PROGRAMS = ("slurmctld", "slurmscriptd", "slurmd", "munged")

    def __init__(self, lab: Lab):
        """Start it, and wait until all hosts take jobs; about a second."""
        self._folder = lab.folder / "slurm"
        self._processes: list[subprocess.Popen] = []
        self.env = {"SLURM_CONF": str(self._folder / "slurm.conf")}
        self._folder.mkdir()
        try:
            self._start(lab)
        except BaseException:
            self.close()
            raise

    def _start(self, lab: Lab) -> None:
        folder = self._folder
        for name in ("state", *(f"spool.{host}" for host in lab.hosts)):
            (folder / name).mkdir()
        text = SLURM_CONF.format(first=lab.hosts[0], folder=folder, names=",".join(lab.hosts))
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        munged = [which("munged"), "--force", "-F", f"--socket={folder}/munge.sock", *files]
        self._run(lab, lab.hosts[0], "munged", munged)
        self._run(lab, lab.hosts[0], "slurmctld", [which("slurmctld"), "-D"])
        for host in lab.hosts:
            # Where it looks for control groups there are none, and it wants a mounted folder.
            daemon = f"mount -t tmpfs none /sys/fs/cgroup; exec {which('slurmd')} -D -N {host}"
            self._run(lab, host, f"slurmd.{host}", ["bash", "-c", daemon])
        deadline = time.monotonic() + 30
        while self._idle(lab) < len(lab.hosts):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def _run(self, lab: Lab, host: str, name: str, command: list[str]) -> None:
        log = self._folder / f"{name}.log"
        self._processes.append(lab.start(host, command, log, **self.env))

    def _idle(self, lab: Lab) -> int:
        log = self._folder / "sinfo"
        ask = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
        lab.start(lab.hosts[0], ask, log, **self.env).wait(30)
        return sum(line in lab.hosts for line in log.read_text().split())

    def logs(self) -> str:
        """Return the ends of what all daemons have said."""
        return "\n".join(
            f"{path.name}:\n{path.read_text()[-1500:]}" for path in self._folder.glob("*.log")
        )

    def close(self) -> None:
        """End all daemons."""
        for process in reversed(self._processes):
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)
