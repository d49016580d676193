#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a launcher, watches what its ranks say, and ends all of it when one has failed.

usage: job.py [OPTIONS] COMMAND [ARGUMENT ...]

Launchers alone cannot be relied on: `deepspeed` returns 0 when its pdsh is killed, DeepSpeed's
MPICH launcher always; `pdsh` waits for a host that is gone, and leaves processes behind.  The ranks
are started with launch/rank.py, which says on stdout when each begins and how it ends.  So this
passes the output on, and

- gives the others GRACE_S seconds to end when a rank has failed, then ends the launcher
- ends every process that the launcher has left behind on this host; ranks elsewhere end by
  themselves when nobody listens any more
- returns 0 only if every rank has said that it ended with 0; else the status of the first that
  failed by itself, not for want of another, or the launcher's
- says at the end, a line each, which ranks failed first, where, why, and from which no word came
"""

import argparse
import ctypes
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

from rank import is_unheard

try:
    import psutil
except ModuleNotFoundError:  # help works without it
    psutil = None

# What launch/rank.py says; launchers put the name of the host before it.
WORD = re.compile(
    r"zero8: rank (\d+) of (\d+) on (\S+): "
    r"(?:(started), process \d+|ended, status (\d+)(?:: (.*))?)"
)
# What pdsh says when it has lost a host, or the command there has failed.
LOST = re.compile(r"pdsh@\S+: (\S+): ssh exited with exit code (\d+)")
# How a rank ends because another has: it may be heard first, as the other still cleans up.
OF_ANOTHER = re.compile(
    r"(closed|reset) by peer|Broken pipe|Timed out waiting|Watchdog caught collective|"
    r"ended from outside|the launcher is gone"
)
# What the launcher has to end by itself after SIGTERM.
TERM_S = 10


def main() -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=int, default=0, help="that must end well; 0: all that start here"
    )
    parser.add_argument(
        "--hosts", default="", help="the hosts' names with commas, to name the silent"
    )
    parser.add_argument(
        "--grace-s", type=float, default=30, help="for the others, when one has failed"
    )
    parser.add_argument("--restarts", action="store_true", help="the launcher starts ranks again")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND [ARGUMENT ...]")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("expected a command")
    if psutil is None:
        parser.exit(2, "launch/job.py: needs psutil: pip install 'zero8[launch]'\n")
    return Job(arguments).run()


@dataclass
class Words:
    """What the ranks have said so far.

    Attributes:
        world_size: as the rank says that was started last.
        hosts: by rank, where it was started last.
        ends: by rank, how it ended: status and cause; None while it runs.
        failures: in the order in which they were heard.
        lost: by host, how the ssh to it ended, if not with 0.
    """

    world_size: int = 0
    hosts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, tuple[int, str] | None] = field(default_factory=dict)
    failures: list[tuple[int, str, int, str]] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)

    def hear(self, line: str) -> None:
        """Take a line of the launcher's output in."""
        if found := LOST.search(line):
            self.lost.setdefault(found[1], int(found[2]))
        for found in WORD.finditer(line):
            rank, host = int(found[1]), found[3]
            self.world_size, self.hosts[rank] = int(found[2]), host
            if found[4]:
                self.ends[rank] = None
                continue
            status, cause = int(found[5]), (found[6] or "").strip()
            self.ends[rank] = (status, cause)
            if status:
                self.failures.append((rank, host, status, cause))

    def failures_in_order(self) -> list[tuple[int, str, int, str]]:
        """Return the failures, those that another rank's has caused last."""
        return sorted(self.failures, key=lambda failure: bool(OF_ANOTHER.search(failure[3])))

    def is_any_up(self) -> bool:
        """Return whether a rank runs."""
        return any(end is None for end in self.ends.values())

    def unwell(self, ranks: int) -> list[int]:
        """Return the ranks that have not said that they ended with 0.

        Of so many; with 0, of those of the last world from which a word came: of this host's, say.
        """
        expected = range(ranks) if ranks else [r for r in sorted(self.ends) if r < self.world_size]
        return [rank for rank in expected if not self._ended_well(rank)]

    def _ended_well(self, rank: int) -> bool:
        end = self.ends.get(rank)
        return end is not None and end[0] == 0


class Job:
    """A launcher and all that it starts on this host."""

    def __init__(self, arguments: argparse.Namespace):
        """Take what `main` has parsed."""
        self._arguments = arguments
        self._words = Words()
        self._end_at: float | None = None  # by when the launcher must have ended
        self._is_asked = False  # the launcher, to end
        self._interrupted: int | None = None  # by this signal

    def run(self) -> int:
        """Run the launcher to its end and return the exit status."""
        prctl, set_child_subreaper = ctypes.CDLL(None).prctl, 36  # of <sys/prctl.h>
        prctl(set_child_subreaper, 1)  # processes without a parent become ours
        self._began = time.monotonic()
        self._launcher = subprocess.Popen(
            self._arguments.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._asked_to_end)
        self._listen(self._launcher.stdout.fileno())
        _kill_all()
        status = self._launcher.wait()
        return self._report(128 - status if status < 0 else status)

    def _listen(self, output: int) -> None:
        """Pass the output on until the launcher has ended, or its time is over."""
        selector = selectors.DefaultSelector()
        selector.register(output, selectors.EVENT_READ)
        rest, ended = b"", False
        while not ended:
            # Once more after the end: it may have left words in the pipe.
            ended = self._launcher.poll() is not None
            while selector.get_map() and selector.select(timeout=0 if ended else 0.5):
                data = os.read(output, 65536)
                if not data:
                    selector.unregister(output)
                    break
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._words.hear(line.decode(errors="replace"))
                self._limit()
            if not selector.get_map():
                time.sleep(0.1)
            if is_unheard() and self._interrupted is None:
                self._asked_to_end(signal.SIGHUP)
            self._limit()

    def _limit(self) -> None:
        """Ask the launcher to end when its ranks had their time, and kill it if it does not."""
        now = time.monotonic()
        if self._interrupted is None:
            # A launcher that starts ranks again has its time only while none runs.
            words = self._words
            is_saved = self._arguments.restarts and words.is_any_up()
            over = (words.failures or words.lost) and not is_saved
            self._end_at = (self._end_at or now + self._arguments.grace_s) if over else None
        if self._end_at is None or now < self._end_at:
            return
        if not self._is_asked:
            self._is_asked = True
            self._launcher.send_signal(signal.SIGTERM)
        if now > self._end_at + TERM_S:
            _kill_all()

    def _asked_to_end(self, number: int, *_: object) -> None:
        self._interrupted, self._end_at = number, time.monotonic()

    def _report(self, status: int) -> int:
        """Say how the ranks ended, and return the status of the job."""
        words = self._words
        unwell = words.unwell(self._arguments.ranks)
        seconds = f"{time.monotonic() - self._began:.0f} s"
        # What became of a host that others have replaced is in the launcher's status, too.
        is_well = words.world_size and not unwell and (status == 0 or self._arguments.restarts)
        if is_well and self._interrupted is None:
            count = self._arguments.ranks or sum(rank < words.world_size for rank in words.ends)
            print(f"zero8: all {count} rank(s) ended well after {seconds}", flush=True)
            return 0
        if self._interrupted is not None:
            status = 128 + self._interrupted
        elif words.failures:
            status = words.failures_in_order()[0][2]
        status = status or 1
        print(f"zero8: the job failed after {seconds}, exit status {status}", flush=True)
        for rank, host, code, cause in words.failures_in_order():
            print(f"zero8:   rank {rank} on {host}: status {code}: {cause}", flush=True)
        told = {rank for rank, *_ in words.failures}
        for rank in unwell:
            if rank not in told:
                print(f"zero8:   {self._silence(rank)}", flush=True)
        if not words.world_size:
            print("zero8:   no rank was started: see the launcher's words above", flush=True)
        return status

    def _silence(self, rank: int) -> str:
        host = self._words.hosts.get(rank)
        if host:
            return f"rank {rank} on {host}: no word since it started{self._loss(host)}"
        silent = [
            h for h in self._arguments.hosts.split(",") if h not in self._words.hosts.values()
        ]
        told = ", ".join(h + self._loss(h) for h in silent if h)
        return f"rank {rank}: not started; no word from {told or 'it'}"

    def _loss(self, host: str) -> str:
        status = self._words.lost.get(host)
        return f": is {host} up?" if status is None else f": ssh to {host} ended with {status}"


def _kill_all() -> None:
    """Kill all that this process has started, and what those have."""
    processes = psutil.Process().children(recursive=True)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)


if __name__ == "__main__":
    sys.exit(main())
