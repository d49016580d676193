# SPDX-License-Identifier: Apache-2.0
"""A step in an environment with zero8's wheel and no compiler: plain, under FSDP2, under ZeRO-2.

It imports nothing of the tests, which are not on the path.
"""

import json
import os
import sys

import torch
from torch import nn


def plain() -> None:
    import zero8

    weights = nn.Parameter(torch.ones(2500, 4000))
    weights.grad = torch.ones(2500, 4000)
    zero8.Adam8bitBlockwise([weights], lr=0.1).step()
    assert (weights < 1).all()


def fsdp2() -> None:
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    import zero8

    distributed.init_process_group("gloo")
    model = nn.Linear(256, 256)
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (2,)))
    before = model.weight.to_local().clone()
    optimizer = zero8.Adam8bitBlockwise(model.parameters(), lr=0.1)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    assert (model.weight.to_local() != before).all()
    distributed.destroy_process_group()


def zero2() -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2], "DS_ACCELERATOR": "cpu"}
    import deepspeed

    # DeepSpeed compiles this op where the accelerator is the CPU, and only there.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "Adam8bitBlockwise", "params": {"lr": 0.1}},
    }
    engine, *_ = deepspeed.initialize(model=nn.Linear(256, 256), config=config)
    before = engine.module.weight.clone()
    engine.backward(engine(torch.ones(1, 256, dtype=torch.bfloat16)).sum())
    engine.step()
    assert (engine.module.weight != before).all()


def runtimes() -> int:
    """Return how many OpenMP runtimes this process has loaded."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/" in line}
    return sum(
        os.path.basename(path).startswith(("libgomp", "libomp", "libiomp")) for path in paths
    )


def main() -> None:
    {"plain": plain, "fsdp2": fsdp2, "zero2": zero2}[sys.argv[1]]()
    from zero8.op import kernel

    op = kernel.module()
    found = {"op": op.__file__, "has_threads": op.has_threads(), "runtimes": runtimes()}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
