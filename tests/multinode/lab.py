# SPDX-License-Identifier: Apache-2.0
"""Hosts on this machine: network namespaces with names, processes, /tmp and sshd of their own.

A host is a bash in namespaces of its own for the network, the host name, processes, mounts and
shared memory, and process 1 there, which becomes sshd.  All hosts are on one switch, a bridge in a
namespace that leads nowhere else, so that nothing leaves this machine.  Needs root.

Their ssh finds a key and the other hosts' names in files that are mounted over those in /etc, in
the host's own namespace: nothing of this machine is changed.
"""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from zero8.op import build

REPOSITORY = Path(__file__).parents[2]
TOOLS = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh"}
_NETWORK = "10.77.0"

SSH_CONFIG = """
Host *
  IdentityFile {folder}/key
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  LogLevel ERROR
"""
SSHD_CONFIG = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
PidFile none
StrictModes no
UsePAM no
UseDNS no
"""
# Process 1 of a host.  What it needs of this machine's /tmp stays visible under its own.
BOOT = """
set -e
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
for keep in {kept}; do
  mkdir -p {folder}/{name}.tmp/"${{keep#/tmp/}}"
  mount --rbind "$keep" {folder}/{name}.tmp/"${{keep#/tmp/}}"
done
mount --rbind {folder}/{name}.tmp /tmp
mkdir -p /run/sshd
exec {sshd} -D -e -f {folder}/sshd_config
"""


def missing() -> str | None:
    """Return what this machine lacks for hosts, None if it is nothing."""
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    if lacking := packages_without(TOOLS):
        return f"no hosts in network namespaces: apt-get install {lacking}"
    name = f"z8probe{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if probe.returncode:
        return f"no network namespaces: {probe.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return None


def packages_without(tools: dict[str, str]) -> str:
    """Return the packages of the programs that this machine lacks."""
    return " ".join(package for tool, package in tools.items() if not which(tool))


def which(tool: str) -> str | None:
    """Return the path of a program, of the superuser's too."""
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


class Lab:
    """Hosts node0, node1, ..., which share this machine's disk but for /tmp."""

    def __init__(self, num_hosts: int):
        """Start the hosts; takes about a tenth of a second each."""
        self.hosts = [f"node{i}" for i in range(num_hosts)]
        # Not in /tmp, of which each host has its own.
        self.folder = Path(tempfile.mkdtemp(prefix="zero8-lab-", dir="/var/tmp"))
        self._prefix = f"z8x{self.folder.name[-8:]}"
        self._processes: dict[str, subprocess.Popen] = {}
        try:
            self._write_files()
            self._switch = f"{self._prefix}sw"
            _run("ip", "netns", "add", self._switch)
            self._on_switch("link", "add", "sw", "type", "bridge")
            self._on_switch("link", "set", "sw", "up")
            for host in self.hosts:
                self._plug_in(host)
                self._boot(host)
            for host in self.hosts:
                self._wait_for_sshd(host)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all hosts, and everything on them."""
        for host in list(self._processes):
            self._end(host)
        for name in [*(f"{self._prefix}{host}" for host in self.hosts), f"{self._prefix}sw"]:
            with suppress(subprocess.CalledProcessError):  # it was not made
                _run("ip", "netns", "del", name)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- What can be done to a host ---------------------------------------------------------------

    def power_off(self, host: str) -> None:
        """Take a host's power away: its processes end, and no packet says so."""
        self._on_switch("link", "set", self._port(host), "down")
        self._end(host)

    def restore(self, host: str) -> None:
        """Start a host that is off, and wait for its sshd."""
        if host not in self._processes:
            self._boot(host)
            self._wait_for_sshd(host)

    def start(self, host: str, command: list[str], log: Path, **env: str) -> subprocess.Popen:
        """Start a command on a host, in the checkout's folder, with its output in a file."""
        with open(log, "wb") as file:
            return subprocess.Popen(
                self._enter(host, command),
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def processes(self, host: str) -> list[psutil.Process]:
        """Return the processes of a host, but for its sshd's."""
        if host not in self._processes:
            return []
        space = os.readlink(f"/proc/{self._first_process(host)}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, OSError):
                is_here = os.readlink(f"/proc/{process.pid}/ns/pid") == space
                is_zombie = process.status() == psutil.STATUS_ZOMBIE
                if is_here and not is_zombie and process.name() != "sshd":
                    found.append(process)
        return found

    # --- Parts ------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        for key in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
        (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
        numbered = enumerate(self.hosts, start=1)
        names = ["127.0.0.1 localhost", *(f"{_NETWORK}.{i} {host}" for i, host in numbered)]
        (folder / "hosts").write_text("\n".join(names) + "\n")
        for host in self.hosts:
            (folder / f"{host}.tmp").mkdir(mode=0o1777)

    def _plug_in(self, host: str) -> None:
        space, port = f"{self._prefix}{host}", self._port(host)
        address = f"{_NETWORK}.{self.hosts.index(host) + 1}/24"
        _run("ip", "netns", "add", space)
        self._on_switch("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        self._on_switch("link", "set", port, "master", "sw", "up")
        _run("ip", "-n", space, "address", "add", address, "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")

    def _on_switch(self, *arguments: str) -> None:
        _run("ip", "-n", self._switch, *arguments)

    def _port(self, host: str) -> str:
        """Return the name of the switch's end of a host's cable."""
        return f"p{self.hosts.index(host)}"

    def _end(self, host: str) -> None:
        process = self._processes.pop(host, None)
        if process is not None:
            process.send_signal(signal.SIGKILL)  # --kill-child: with process 1 go all of the host
            process.wait()

    def _first_process(self, host: str) -> int:
        assert host in self._processes, f"{host} is off"
        return psutil.Process(self._processes[host].pid).children()[0].pid

    def _enter(self, host: str, command: list[str]) -> list[str]:
        first = self._first_process(host)
        # nsenter goes to / with the mounts.
        inside = f"cd {shlex.quote(str(REPOSITORY))} && exec {shlex.join(command)}"
        names = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        return ["nsenter", "--target", str(first), *names, "bash", "-c", inside]

    def _boot(self, host: str) -> None:
        # Each host has a /tmp of its own: without the ops that are built it would build its own.
        needed = [path for path in (REPOSITORY, build.cache_root()) if path.exists()]
        kept = shlex.join(str(path) for path in needed if path.is_relative_to("/tmp"))
        boot = BOOT.format(name=host, folder=self.folder, kept=kept, sshd=which("sshd"))
        self._on_switch("link", "set", self._port(host), "up")
        with open(self.folder / f"{host}.sshd.log", "wb") as log:
            self._processes[host] = subprocess.Popen(
                # With this process go the hosts, however it ends.
                ["setpriv", "--pdeathsig", "KILL"]
                + ["nsenter", f"--net=/run/netns/{self._prefix}{host}"]
                + ["unshare", "--uts", "--ipc", "--pid", "--mount", "--fork"]
                + ["--kill-child", "--mount-proc"]
                + ["bash", "-c", boot],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _wait_for_sshd(self, host: str) -> None:
        deadline = time.monotonic() + 10
        log = self.folder / f"{host}.sshd.log"
        while "Server listening" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            assert self._processes[host].poll() is None, log.read_text()
            time.sleep(0.02)
