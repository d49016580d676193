#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gathers over MPI what every rank has, prints a table, and fails on every rank if they differ.

usage: mpirun ... python launch/mpi_world.py RANKS
"""

import os
import platform
import socket
import sys
from importlib import metadata

from mpi4py import MPI
from tabulate import tabulate

from zero8.op.build import target_of_steps

PACKAGES = ("torch", "zero8", "deepspeed")


def main() -> int:
    """Print the world from rank 0 and return 0 if it is as it should be."""
    expected = int(sys.argv[1])
    world = MPI.COMM_WORLD
    ranks = world.allgather({"rank": world.Get_rank(), **about()})
    problems = different(ranks)
    if len(ranks) != expected:
        library = MPI.Get_library_version().partition("\n")[0]
        problems.insert(
            0,
            f"got a world of {len(ranks)} rank(s), expected {expected}: mpi4py has loaded "
            f"{library!r}; is MPIRUN of another MPI?",
        )
    if world.Get_rank() == 0:
        print(tabulate(ranks, headers="keys"), flush=True)
        for problem in problems:
            print(f"zero8: {problem}", file=sys.stderr, flush=True)
    return 1 if problems else 0


def about() -> dict[str, str | int]:
    """Return what this rank has."""
    return {
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel for": target_of_steps(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def version(package: str) -> str:
    """Return a package's version, "none" without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def different(ranks: list[dict]) -> list[str]:
    """Return what must be equal on all ranks and is not; processors may differ."""
    problems = []
    for name in ("python", *PACKAGES):
        found = {}
        for rank in ranks:
            found.setdefault(rank[name], []).append(rank["host"])
        if len(found) > 1:
            where = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in found.items())
            problems.append(f"{name} differs: {where}; install the same on all hosts")
    return problems


if __name__ == "__main__":
    sys.exit(main())
