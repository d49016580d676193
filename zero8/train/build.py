# SPDX-License-Identifier: Apache-2.0
"""Builds the ops of runs before they start: `python -m zero8.train.build CONFIG [OPTIMIZER]`.

Ranks that compile may be killed, and DeepSpeed waits without end for a build that was.
"""

import json
import sys
import time
from pathlib import Path

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

from zero8.op.build import build_lock
from zero8.train.config import is_stepped_by_torch, offload_device
from zero8.train.engine import BASELINE, EIGHT_BIT
from zero8.zero.op_builder import Zero8AdamBuilder

# About how long two cores take to compile an op.
SECONDS = {
    Zero8AdamBuilder.NAME: 10,
    CPUAdamBuilder.NAME: 45,
    PinMemoryBuilder.NAME: 45,
    AsyncIOBuilder.NAME: 120,
}


def build_ops() -> None:
    """Build ours and DeepSpeed's AdamW on the CPU."""
    _load(Zero8AdamBuilder())
    _build([CPUAdamBuilder()])


def leave_out_shared_memory() -> None:
    """Keep DeepSpeed from compiling an all_reduce that is never called here.

    It is for ranks that DeepSpeed's own launcher started, whose environment has LOCAL_SIZE.
    """
    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False


def build_aio() -> None:
    """Build what DeepSpeed swaps to a disk with; see `missing_for_nvme`."""
    _build([PinMemoryBuilder(), AsyncIOBuilder()])


def missing_for_nvme() -> str | None:
    """Return what optimizer states on a disk lack on this machine, None if it is nothing."""
    # DeepSpeed's own test.  AsyncIOBuilder.is_compatible would print advice, too.
    if AsyncIOBuilder().has_function("io_submit", ("aio",)):
        return None
    return (
        'offload_optimizer.device "nvme" needs libaio and its headers; Debian and Ubuntu: '
        "apt-get install libaio-dev"
    )


def build_for(config: dict) -> None:
    """Build what a DeepSpeed config needs beside `build_ops`: aio, or AdamW without offload."""
    device = offload_device(config)
    if device == "nvme":
        build_aio()
    elif device == "none" and not is_stepped_by_torch(config):
        _build([get_accelerator().create_op_builder("FusedAdamBuilder")])


def _build(builders: list) -> None:
    for builder in builders:
        with build_lock(builder.name):
            _load(builder)


def _load(builder) -> None:
    """Load an op, which compiles it unless that has been done, and say how long it took."""
    seconds = SECONDS.get(builder.name)
    usual = f" ({seconds} s if it has to be compiled)" if seconds else ""
    print(f"op {builder.name}{usual} ...", end=" ", flush=True)
    began = time.perf_counter()
    builder.load(verbose=False)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    """Build what runs with one optimizer, or with both, need; or end with what is missing."""
    path, *optimizers = sys.argv[1:]
    config = json.loads(Path(path).read_text())
    if offload_device(config) == "nvme" and (missing := missing_for_nvme()):
        sys.exit(f"zero8: {missing}")
    for optimizer in optimizers or (EIGHT_BIT, BASELINE):
        if optimizer == EIGHT_BIT:
            _load(Zero8AdamBuilder())
        else:
            _build([CPUAdamBuilder()])
    build_for(config)


if __name__ == "__main__":
    main()
