#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a script as one rank of a job, whichever launcher started it, and says how it ended.

usage: rank.py [OPTIONS] SCRIPT [ARGUMENT ...]
       rank.py [OPTIONS] -m MODULE [ARGUMENT ...]

All launchers of this folder start their ranks through it, so that what they share stands once:

- RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set, from whatever the launcher sets
- the world has the size that was asked for
- the network interface is the one that leads to the other hosts
- each rank of a host gets its own cores
- all output goes to RUN_DIR/node-HOST-rank-RANK.log, that of rank 0 to the screen, too
- a rank that gives no sign of life for TIMEOUT_S seconds is killed, and every process group that it
  makes gets TIMEOUT_S as its time limit (run_script.py does that, inside the rank)
- when the launcher is gone, so is the rank
- at the end, one line says what became of the rank and why; launch/job.py reads it

Standard library only: it watches, and must not take the memory of a second PyTorch.
"""

import argparse
import ctypes
import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

RUN_SCRIPT = Path(__file__).resolve().with_name("run_script.py")
# Where launchers say who a rank is: rank, world size, rank on its host.  Those of torchrun and of
# DeepSpeed come first, as both may have been started by the others.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
# And where they say how many ranks this host has: torchrun, DeepSpeed, Open MPI, MPICH, Slurm.
LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
# Statuses of our own: of a wrong environment, as of wrong usage; and of a rank that was killed
# because it gave no sign of life, as timeout(1) has it.
USAGE, TIMED_OUT = 2, 124
# What a rank that is asked to end has for its last words.
TERM_S = 5
# Open MPI's program on each host, which a job that has failed ends within moments, unless its host
# is cut off: then it would stay until TCP gives up, a quarter of an hour.
DAEMONS = ("orted", "prted")
DAEMON_S = 30
# Importing PyTorch comes before the first sign of life; from a slow network disk it takes minutes.
START_S = 300
CAUSE = re.compile(
    rb"^(?:\[rank\d+\]: *)?((?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*)"
)


def main() -> int:
    """Run the rank and return its exit status."""
    arguments = _arguments()
    try:
        variables = environment(os.environ, arguments.master, arguments.ranks)
    except ValueError as error:
        print(f"zero8: {socket.gethostname()}: {error}", file=sys.stderr)
        return USAGE
    os.environ.update(variables)
    # DeepSpeed would compile an all_reduce over shared memory, for a minute, in every rank.
    os.environ.pop("LOCAL_SIZE", None)
    _choose_interface(arguments.hosts.split(","))
    _bind_cores(int(variables["LOCAL_RANK"]), int(variables["LOCAL_WORLD_SIZE"]))
    return Rank(arguments).run()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=0, help="the world size to insist on; 0: any")
    parser.add_argument("--hosts", default="", help="the names of all hosts, with commas")
    parser.add_argument("--master", default="", help="HOST:PORT to meet at, if not the launcher's")
    parser.add_argument("--run-dir", type=Path, default="runs/rank", help="folder for the logs")
    parser.add_argument("--timeout-s", type=float, default=600, help="limit for signs of life")
    parser.add_argument("-m", action="store_true", dest="is_module", help="run a module")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("expected a script, or -m and a module")
    return arguments


def environment(environ: Mapping[str, str], master: str, ranks: int) -> dict[str, str]:
    """Return the variables by which torch.distributed knows who this rank is.

    Args:
        environ: of this process, with what the launcher has set.
        master: HOST:PORT, for launchers that do not name it.
        ranks: the world size that was asked for, 0 for any.

    Raises:
        ValueError: if no launcher has said who this rank is, or the world has another size.
    """
    names = next((names for names in LAUNCHERS if all(name in environ for name in names)), None)
    if names is None:
        raise ValueError(
            "no launcher has said who this rank is: expected RANK, WORLD_SIZE and LOCAL_RANK in "
            "the environment, or the variables of Open MPI, MPICH or Slurm"
        )
    rank, world_size, local_rank = (int(environ[name]) for name in names)
    local_size = next((int(environ[name]) for name in LOCAL_SIZES if name in environ), 1)
    if ranks and world_size != ranks:
        raise ValueError(
            f"{names[1]} says that the world has {world_size} rank(s), expected {ranks}"
        )
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
    }
    if master:
        variables["MASTER_ADDR"], _, variables["MASTER_PORT"] = master.rpartition(":")
    return variables


def _choose_interface(hosts: Sequence[str]) -> None:
    """Set the interface for gloo and NCCL to the one that leads to another host, unless it is set.

    By default gloo takes the address that the host's own name resolves to.  On Debian that is
    127.0.1.1, and no other host can connect to it.
    """
    others = [host for host in hosts if host and host not in _own_names()]
    address = next(filter(None, map(_own_address_towards, others)), None)
    interface = _interface_of(address) if address else None
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _own_names() -> set[str]:
    name = socket.gethostname()
    return {name, name.partition(".")[0], "localhost", "127.0.0.1"}


def _own_address_towards(host: str) -> str | None:
    """Return the address that packets to a host leave from; none is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            address = probe.getsockname()[0]
    except OSError:
        return None
    return None if address.startswith("127.") else address


def _interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address, by `ip -o -4 address`."""
    try:
        lines = subprocess.run(
            ["ip", "-o", "-4", "address"], capture_output=True, text=True, timeout=10
        ).stdout
    except OSError:
        return None
    found = re.search(rf"^\d+: (\S+) +inet {re.escape(address)}/", lines, re.MULTILINE)
    return found and found[1]


def _bind_cores(local_rank: int, local_size: int) -> None:
    """Give each rank of a host its own cores, unless the launcher has done so already.

    One that has bound this process has other cores itself.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores)
    if set(cores) == os.sched_getaffinity(os.getppid()):
        each = max(1, len(cores) // local_size)
        first = local_rank * each % len(cores)  # there may be more ranks than cores
        os.sched_setaffinity(0, cores[first : first + each])
    os.environ.setdefault("OMP_NUM_THREADS", str(each))


class Rank:
    """A rank and its log, watched until it ends."""

    def __init__(self, arguments: argparse.Namespace):
        """Take what `main` has parsed; the environment says who the rank is."""
        self._host = socket.gethostname()
        self._name = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} on {self._host}"
        self._timeout_s = arguments.timeout_s
        kind = ["-m"] if arguments.is_module else []
        self._command = [sys.executable, "-u", str(RUN_SCRIPT), *kind, *arguments.command]
        arguments.run_dir.mkdir(parents=True, exist_ok=True)
        self._log_path = arguments.run_dir / f"node-{self._host}-rank-{os.environ['RANK']}.log"
        self._is_shown = os.environ["RANK"] == "0"
        self._why = ""  # it was ended from here, if it was

    def run(self) -> int:
        """Run the rank to its end and return its exit status, 128 + N for a signal N."""
        signs, sign = os.pipe()
        os.set_inheritable(sign, True)
        environ = {
            **os.environ,
            "ZERO8_SIGN_FD": str(sign),
            "ZERO8_TIMEOUT_S": str(self._timeout_s),
        }
        with open(self._log_path, "ab", buffering=0) as self._log:
            self._child = subprocess.Popen(
                self._command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[sign],
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            os.close(sign)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, self._asked_to_end)
            _say(f"zero8: {self._name}: started, process {self._child.pid}, log {self._log_path}")
            self._watch(self._child.stdout.fileno(), signs)
            self._kill()  # what the rank has left running
            return self._end(self._child.wait())

    def _watch(self, output: int, signs: int) -> None:
        """Copy the rank's output, and end it if it hangs or nobody listens any more."""
        alive_until = time.monotonic() + max(START_S, self._timeout_s)
        selector = selectors.DefaultSelector()
        selector.register(output, selectors.EVENT_READ)
        selector.register(signs, selectors.EVENT_READ)
        while self._child.poll() is None or output in selector.get_map():
            for key, _ in selector.select(timeout=0.5):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fd)
                elif key.fd == signs:
                    alive_until = time.monotonic() + self._timeout_s
                else:
                    self._copy(data)
            if self._child.poll() is not None and not selector.select(timeout=0):
                return  # a process that it has left behind holds the pipe
            if time.monotonic() > alive_until:
                self._why = self._why or f"no sign of life for {self._timeout_s:.0f} s"
                self._kill()
            if is_unheard():
                self._why = self._why or "the launcher is gone"
                self._kill()

    def _copy(self, data: bytes) -> None:
        self._log.write(data)
        if self._is_shown:
            with suppress(BrokenPipeError):  # `_watch` notices
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()

    def _asked_to_end(self, number: int, _: object) -> None:
        self._why = self._why or f"ended from outside by {signal.Signals(number).name}"
        self._signal(signal.SIGTERM)
        # Not by waiting here: the loop copies the last words meanwhile.
        signal.signal(signal.SIGALRM, lambda *_: self._kill())
        signal.alarm(TERM_S)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)

    def _end(self, status: int) -> int:
        """Say what became of the rank, and why."""
        signal.alarm(0)
        if self._why.startswith("no sign"):
            code, cause = TIMED_OUT, self._why
        elif status < 0:
            code, cause = 128 - status, f"killed by {signal.Signals(-status).name}"
            if self._why:
                cause = self._why
            elif -status == signal.SIGKILL:
                cause += ", by somebody or for want of memory"
        else:
            code, cause = status, last_error(self._log_path) if status else ""
        if code:
            _end_daemon()
        words = f"status {code}: {cause} ({self._log_path})" if code else "status 0"
        _say(f"zero8: {self._name}: ended, {words}")
        return code


def _end_daemon() -> None:
    """Leave a process that ends Open MPI's daemon of this host, if that has not ended by itself."""
    parent = os.getppid()
    try:
        is_daemon = Path(f"/proc/{parent}/comm").read_text().strip() in DAEMONS
        daemon = os.pidfd_open(parent) if is_daemon else -1
    except OSError:  # it has gone
        return
    if not is_daemon or os.fork():
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # who reads them would wait for this process, too
        os.dup2(null, stream)
    if not select.select([daemon], [], [], DAEMON_S)[0]:
        signal.pidfd_send_signal(daemon, signal.SIGKILL)
    os._exit(0)


def last_error(path: Path, tail_bytes: int = 1 << 16) -> str:
    """Return the last line of a log that names an error; if none does, so and its last line."""
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - tail_bytes))
        lines = [line for line in file.read().splitlines() if line.strip()]
    errors = [found[1] for line in lines if (found := CAUSE.match(line))]
    line = errors[-1] if errors else b"no error in its log, which ends: " + (lines or [b""])[-1]
    return line.decode(errors="replace").strip()[:300]


def _say(line: str) -> None:
    """Write a line in one piece, or not at all if nobody listens."""
    with suppress(OSError):
        os.write(1, f"{line}\n".encode())


def is_unheard() -> bool:
    """Return whether who reads our output has gone, be it a pipe or a socket."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


def _die_with_parent() -> None:
    prctl, set_death_signal = ctypes.CDLL(None).prctl, 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    prctl(set_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
