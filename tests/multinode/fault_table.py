# SPDX-License-Identifier: Apache-2.0
"""Prints how jobs on two hosts end when something happens: the table of launch/README.md.

usage: as root, PYTHONPATH=.:tests/support .venv/bin/python tests/multinode/fault_table.py
"""

import time

from jobs import GRACE_S, LAUNCHERS, LOOP, TIMEOUT_S, Job
from lab import REPOSITORY, Lab
from tabulate import tabulate

# What loop.py does to its rank 1, and what is done to the host of that.
OF_A_RANK = {"rank exits with 17": "exit", "rank killed": "kill", "rank hangs (SIGSTOP)": "stop"}
OF_A_HOST = {"host powered off": "power_off", "cable pulled": "unplug"}


def end_of(lab: Lab, launcher: str, fault: str) -> str:
    """Return the seconds from a fault to the end of the job, and its exit status."""
    script, env = LAUNCHERS[launcher]
    arguments = [LOOP, "100000", *([OF_A_RANK[fault], "1", "4"] if fault in OF_A_RANK else [])]
    job = Job(lab, "node0", [str(REPOSITORY / "launch" / script), *arguments], env)
    try:
        job.wait_for("step 3\n")
        if fault in OF_A_HOST:
            getattr(lab, OF_A_HOST[fault])("node1")
        began = time.monotonic()
        status = job.process.wait(180)
        seconds = time.monotonic() - began
        job.assert_nothing_is_left(may_stay="orted")  # see test_faults.py
        return f"{seconds:.0f} s, {status}"
    finally:
        job.close()
        for host in lab.hosts:
            lab.restore(host)


def main() -> None:
    """Run every launcher with every fault, one after the other."""
    lab = Lab(2)
    try:
        rows = [
            [fault, *(end_of(lab, launcher, fault) for launcher in LAUNCHERS)]
            for fault in OF_A_RANK | OF_A_HOST
        ]
    finally:
        lab.close()
    print(
        f"TIMEOUT_S={TIMEOUT_S} GRACE_S={GRACE_S}: seconds from the fault to the end, exit status"
    )
    print(tabulate(rows, headers=["fault", *LAUNCHERS], tablefmt="github"))


if __name__ == "__main__":
    main()
