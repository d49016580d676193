# SPDX-License-Identifier: Apache-2.0
"""A process that ends right after the ranks have agreed ends with status 0."""

import pytest
from processes import python
from ranks import free_port

# Ranks by forks.  The threads of gloo, which drop a collective's tensors last, share a core with
# their rank and get none of it before the rank waits for something.
RUN = """
import os, sys
import torch.distributed
from zero8.environment.ranks import gathered

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

ranks = []
for rank in range(2):
    ranks.append(os.fork())
    if not ranks[-1]:
        held = become(rank)
        gathered(1)
        sys.exit()
print([os.waitpid(rank, 0)[1] for rank in ranks], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_process_that_ends_after_an_agreement_is_not_aborted(attempt):
    """Without `wait_for_gloo_at_exit` torch aborts a quarter of the ranks."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = python(RUN, **rendezvous, WORLD_SIZE="2", OMP_NUM_THREADS="1")
    assert "found a thread" in done.stdout
    assert "[0, 0]" in done.stdout, done.stdout + done.stderr
