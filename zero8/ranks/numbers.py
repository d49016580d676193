# SPDX-License-Identifier: Apache-2.0
"""How many ranks there are, and numbers reduced over them; one process is one rank."""

from collections.abc import Sequence
from typing import Any

import torch

Group = Any
"""A process group of torch.distributed, which not every build of torch has; None is that of all."""


def is_alone() -> bool:
    """Return whether this process has no process group."""
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def num_ranks() -> int:
    """Return how many ranks there are."""
    return 1 if is_alone() else torch.distributed.get_world_size()


def rank() -> int:
    """Return the number of this rank, 0 if there is one only."""
    return 0 if is_alone() else torch.distributed.get_rank()


def total(number: int, process_groups: Sequence[Group]) -> int:
    """Return the sum of a number over the ranks of groups, one after the other.

    All ranks must call this.  One all_reduce of 8 bytes per group; None is the group of all.
    """
    (number,) = _reduced([number], process_groups, "SUM")
    return number


def largest(numbers: Sequence[int], process_groups: Sequence[Group]) -> list[int]:
    """Return the largest of each number over the ranks of groups, called as `total`."""
    return _reduced(numbers, process_groups, "MAX")


def _reduced(numbers: Sequence[int], process_groups: Sequence[Group], op: str) -> list[int]:
    if is_alone():
        return list(numbers)
    for group in process_groups:
        reduced = torch.tensor(numbers, dtype=torch.int64, device=_device_of(group))
        torch.distributed.all_reduce(reduced, getattr(torch.distributed.ReduceOp, op), group)
        numbers = reduced.tolist()
    return list(numbers)


def _device_of(process_group: Group) -> str:
    """Return the type of device whose tensors a group can reduce: of NCCL alone, "cuda"."""
    # get_backend_config of a group that a mesh split off may name backends of its parent alone.
    group: Group = torch.distributed.group.WORLD if process_group is None else process_group
    devices = [device.type for device in group._device_types]
    return "cpu" if "cpu" in devices else devices[0]
