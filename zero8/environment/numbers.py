# SPDX-License-Identifier: Apache-2.0
"""The number of ranks, and numbers reduced over them."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from zero8.environment.at_exit import wait_for_gloo_at_exit

Number = TypeVar("Number", int, float)
Group = Any
"""A process group of torch.distributed, which some builds of torch lack; None: all ranks."""


def is_alone() -> bool:
    """Return whether this process has no process group."""
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def num_ranks() -> int:
    """Return the world size, 1 without a process group."""
    return 1 if is_alone() else torch.distributed.get_world_size()


def rank() -> int:
    """Return this rank, 0 without a process group."""
    return 0 if is_alone() else torch.distributed.get_rank()


def total(number: Number, process_groups: Sequence[Group]) -> Number:
    """Return the sum of a number over groups in turn, by an all_reduce of 8 bytes each.

    All ranks must call this.
    """
    (number,) = _reduced([number], process_groups, "SUM")
    return number


def largest(numbers: Sequence[int], process_groups: Sequence[Group]) -> list[int]:
    """Return the maximum of each number over groups in turn.  All ranks must call this."""
    return _reduced(numbers, process_groups, "MAX")


def _reduced(numbers: Sequence[Number], process_groups: Sequence[Group], op: str) -> list[Number]:
    if is_alone():
        return list(numbers)
    wait_for_gloo_at_exit()
    dtype = torch.int64 if isinstance(numbers[0], int) else torch.float64
    for group in process_groups:
        reduced = torch.tensor(numbers, dtype=dtype, device=device_of(group))
        torch.distributed.all_reduce(reduced, getattr(torch.distributed.ReduceOp, op), group)
        numbers = reduced.tolist()
    return list(numbers)


def device_of(process_group: Group) -> str:
    """Return a device type whose tensors a group can reduce, preferably "cpu"."""
    # Not from get_backend_config: for groups split off by a mesh it may name only the parent's.
    group: Group = torch.distributed.group.WORLD if process_group is None else process_group
    devices = [device.type for device in group._device_types]
    return "cpu" if "cpu" in devices else devices[0]
