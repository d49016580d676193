# SPDX-License-Identifier: Apache-2.0
"""A rank that adds numbers up with the others, step by step, without an end.

Rank 0 prints "step N".
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

# No launcher limits how long a rank waits for another: a script gives the limit to its groups.
LIMIT = timedelta(seconds=15)


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=LIMIT)
    step = 0
    while True:
        dist.all_reduce(torch.ones(()), group=group)
        if dist.get_rank() == 0:
            print(f"step {step}", flush=True)
        step += 1
        time.sleep(0.1)


if __name__ == "__main__":
    main()
