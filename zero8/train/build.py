# SPDX-License-Identifier: Apache-2.0
"""Builds the ops of both runs before they start: `python -m zero8.train.build`.

Ranks that compile may be killed, and DeepSpeed waits without end for a build that was.
"""

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

from zero8.op.builder import Zero8AdamBuilder, build_lock


def build_ops() -> None:
    """Build ours, DeepSpeed's AdamW on the CPU, and, without a GPU, what its comm loads."""
    Zero8AdamBuilder().load(verbose=False)
    theirs = [CPUAdamBuilder()]
    if get_accelerator().device_name() == "cpu":
        theirs.append(ShareMemCommBuilder())
    for builder in theirs:
        with build_lock(builder.name):
            builder.load(verbose=False)


if __name__ == "__main__":
    build_ops()
