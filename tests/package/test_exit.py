# SPDX-License-Identifier: Apache-2.0
"""A process that ends right after the ranks have agreed ends with status 0."""

import threading
import time
from pathlib import Path

import pytest
from processes import python
from ranks import free_port

from zero8.environment import at_exit

# Ranks by forks.  The threads of gloo, which drop a collective's tensors last, share a core with
# their rank and get none of it before the rank waits for something.
RUN = """
import os, sys
import torch.distributed
from zero8.environment import agree, numbers

AGREEMENTS = (
    lambda: agree.gathered(1),
    lambda: agree.from_rank_0(int),
    lambda: numbers.total(1, [None]),
)

def become(rank):
    os.environ["RANK"] = str(rank)
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    cores = sorted(os.sched_getaffinity(0))
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, {cores[rank % len(cores)]})
        with open(f"/proc/self/task/{thread}/comm") as name:
            if name.read().startswith("pt_gloo_runloop"):
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
                print("found a thread")
    return torch.distributed.group.WORLD

for agreement, port in zip(AGREEMENTS, os.environ["PORTS"].split(), strict=True):
    os.environ["MASTER_PORT"] = port
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[-1]:
            held = become(rank)
            agreement()
            sys.exit()
    print([os.waitpid(rank, 0)[1] for rank in ranks], flush=True)
"""


@pytest.mark.slow
def test_process_that_ends_after_an_agreement_is_not_aborted():
    """Without `wait_for_gloo_at_exit` torch aborts a quarter of the ranks."""
    ports = " ".join(str(free_port()) for _ in range(3))
    done = python(RUN, PORTS=ports, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    assert "found a thread" in done.stdout
    assert done.stdout.count("[0, 0]") == 3, done.stdout + done.stderr


def test_end_of_a_process_waits_for_a_gloo_thread_until_it_is_idle():
    named, ended, done = threading.Event(), threading.Lock(), []

    def run():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        named.set()
        threading.Event().wait(0.2)  # with a time limit, as one that waits for Python's lock
        done.append(True)
        ended.acquire()  # waits without a time limit, as an idle thread of gloo does

    ended.acquire()
    thread = threading.Thread(target=run)
    thread.start()
    named.wait()
    started = time.monotonic()
    at_exit._wait()
    assert done and time.monotonic() - started < at_exit._LIMIT_S
    ended.release()
    thread.join()
