# SPDX-License-Identifier: Apache-2.0
"""Prints how jobs on two hosts end when something happens: the table of launch/README.md.

usage, as root: PYTHONPATH=.:tests/support python tests/multinode/fault_table.py [LAUNCHER ...]
"""

import sys
import time

from jobs import GRACE_S, LAUNCHERS, LOOP, STAYS_WHERE_CUT_OFF, TIMEOUT_S, Job
from lab import Lab
from slurm import Slurm
from tabulate import tabulate

# What loop.py does to its rank 1, and what is done to the host of that.
OF_A_RANK = {"rank exits with 17": "exit", "rank killed": "kill", "rank hangs (SIGSTOP)": "stop"}
OF_A_HOST = {"host powered off": "power_off", "cable pulled": "unplug"}


def end_of(lab: Lab, launcher: str, fault: str) -> str:
    """Return the seconds from a fault to the end of the job, and its exit status."""
    script, env = LAUNCHERS[launcher]
    cluster = Slurm(lab) if launcher == "slurm" else None
    arguments = [LOOP, "100000", *([OF_A_RANK[fault], "1", "4"] if fault in OF_A_RANK else [])]
    job = Job(lab, script, arguments, env, slurm=cluster)
    try:
        job.wait_for("step 3\n")
        if fault in OF_A_HOST:
            getattr(lab, OF_A_HOST[fault])("node1")
        began = time.monotonic()
        status = job.process.wait(180)
        seconds = time.monotonic() - began
        job.assert_nothing_is_left(STAYS_WHERE_CUT_OFF.get(launcher, ""))
        return f"{seconds:.0f} s, {status}"
    finally:
        job.close()
        if cluster:
            cluster.close()
        for host in lab.hosts:
            lab.restore(host)


def main() -> None:
    """Run every launcher, or those named, with every fault, one after the other."""
    launchers = sys.argv[1:] or list(LAUNCHERS)
    lab = Lab(2)
    try:
        rows = [
            [fault, *(end_of(lab, launcher, fault) for launcher in launchers)]
            for fault in OF_A_RANK | OF_A_HOST
        ]
    finally:
        lab.close()
    print(
        f"TIMEOUT_S={TIMEOUT_S} GRACE_S={GRACE_S}: seconds from the fault to the end, exit status"
    )
    print(tabulate(rows, headers=["fault", *launchers], tablefmt="github"))


if __name__ == "__main__":
    main()
