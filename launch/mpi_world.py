#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gathers the versions of every rank over MPI, prints them, and fails if they differ.

usage: mpirun ... python launch/mpi_world.py RANKS
"""

import os
import platform
import socket
import sys
from importlib import metadata

from mpi4py import MPI
from tabulate import tabulate

PACKAGES = ("torch", "zero8", "deepspeed")


def main() -> str | None:
    """Print the world from rank 0, and return what is wrong with it."""
    world = MPI.COMM_WORLD
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    host = {"host": socket.gethostname(), "cores": len(os.sched_getaffinity(0))}
    ranks = world.allgather({"rank": world.Get_rank(), **host, **versions})
    if world.Get_rank() == 0:
        print(tabulate(ranks, headers="keys"), flush=True)
    if len(ranks) != int(sys.argv[1]):
        library = MPI.Get_library_version().partition("\n")[0]
        return (
            f"zero8: got a world of {len(ranks)} rank(s), expected {sys.argv[1]}: mpi4py has "
            f"loaded {library!r}; is MPIRUN of another MPI?"
        )
    differing = [name for name in versions if len({rank[name] for rank in ranks}) > 1]
    return f"zero8: hosts differ in {', '.join(differing)}: see the table" if differing else None


def version(package: str) -> str:
    """Return a package's version, "none" without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main())
