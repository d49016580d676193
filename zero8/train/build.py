# SPDX-License-Identifier: Apache-2.0
"""Builds the ops of both runs before they start: `python -m zero8.train.build [CONFIG]`.

Ranks that compile may be killed, and DeepSpeed waits without end for a build that was.
"""

import json
import sys
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

from zero8.op.build import build_lock
from zero8.train.config import is_stepped_by_torch, offload_device
from zero8.zero.op_builder import Zero8AdamBuilder


def build_ops() -> None:
    """Build ours, DeepSpeed's AdamW on the CPU, and, without a GPU, what its comm loads."""
    Zero8AdamBuilder().load(verbose=False)
    theirs = [CPUAdamBuilder()]
    if get_accelerator().device_name() == "cpu":
        theirs.append(ShareMemCommBuilder())
    _build(theirs)


def build_aio() -> None:
    """Build what DeepSpeed swaps to a disk with; it needs libaio and its headers."""
    _build([PinMemoryBuilder(), AsyncIOBuilder()])


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
            builder.load(verbose=False)


if __name__ == "__main__":
    build_ops()
    if sys.argv[1:]:
        build_for(json.loads(Path(sys.argv[1]).read_text()))
