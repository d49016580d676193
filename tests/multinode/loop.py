# SPDX-License-Identifier: Apache-2.0
"""A rank that adds numbers up with the others, step by step, until something happens to one.

usage: loop.py STEPS [FATE RANK STEP]

FATE befalls rank RANK at step STEP: "kill" and "stop" are signals, "exit" the status 17, "raise" an
exception.  Prints "step N" from rank 0, and "sum" at the end.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

STATUS = 17


def main() -> None:
    steps, *fate = sys.argv[1:]
    fate, whose, when = fate or ("", -1, -1)
    dist.init_process_group("gloo")
    group = dist.new_group()  # as DeepSpeed makes one, without a limit of its own
    total = torch.zeros(())
    for step in range(int(steps)):
        if (dist.get_rank(), step) == (int(whose), int(when)):
            befall(fate)
        value = torch.tensor(float(dist.get_rank() + step))
        dist.all_reduce(value, group=group)
        total += value
        if dist.get_rank() == 0:
            print(f"step {step}", flush=True)
        time.sleep(0.1)
    print(f"sum {total.item():.0f}, threads {os.environ['OMP_NUM_THREADS']}", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that shuts down


def befall(fate: str) -> None:
    if fate == "raise":
        raise RuntimeError("this rank was told to fail")
    if fate == "exit":
        sys.exit(STATUS)
    os.kill(os.getpid(), signal.SIGKILL if fate == "kill" else signal.SIGSTOP)


if __name__ == "__main__":
    main()
