# SPDX-License-Identifier: Apache-2.0
"""The other ranks: how many there are, numbers reduced over them, and agreement with them.

All ranks must call what communicates.  Without a process group, the process is the only rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed

from zero8.environment.at_exit import wait_for_gloo_at_exit

T = TypeVar("T")
Number = TypeVar("Number", int, float)
Group = Any
"""A process group of torch.distributed, which some builds of torch lack; None: all ranks."""


def is_alone() -> bool:
    """Return whether this process has no process group."""
    return not (distributed.is_available() and distributed.is_initialized())


def num_ranks() -> int:
    """Return the world size, 1 without a process group."""
    return 1 if is_alone() else distributed.get_world_size()


def rank() -> int:
    """Return this rank, 0 without a process group."""
    return 0 if is_alone() else distributed.get_rank()


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
        distributed.all_reduce(reduced, getattr(distributed.ReduceOp, op), group)
        numbers = reduced.tolist()
    return list(numbers)


def device_of(process_group: Group) -> str:
    """Return a device type whose tensors a group can reduce, preferably "cpu"."""
    # Not from get_backend_config: for groups split off by a mesh it may name only the parent's.
    group: Group = distributed.group.WORLD if process_group is None else process_group
    devices = [device.type for device in group._device_types]
    return "cpu" if "cpu" in devices else devices[0]


def gathered(value: T, group: Group = None) -> list[T]:
    """Return the (small, picklable) values of all ranks of a group, in the order of the ranks."""
    if is_alone():
        return [value]
    wait_for_gloo_at_exit()
    values: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group)
    return values


def from_rank_0(function: Callable[[], T]) -> T:
    """Call a function on rank 0 only, and return its result on all ranks.

    Raises:
        OSError, ValueError, RuntimeError: on all ranks, the error of rank 0's call; RuntimeError
            for any other class.  Without a process group, the error itself.
    """
    if is_alone():
        return function()
    answer: list[Any] = [None, None]
    if rank() == 0:
        try:
            answer[0] = function()
        except Exception as error:  # of any class, as the other ranks wait
            kinds = (kind for kind in (OSError, ValueError) if isinstance(error, kind))
            kind = next(kinds, RuntimeError)
            name = f"{type(error).__name__}: " if kind is RuntimeError else ""
            answer[1] = kind(f"{name}{error}")
    wait_for_gloo_at_exit()
    distributed.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


def raise_together(
    error: BaseException | None, what: str, groups: Sequence[Group] = (None,)
) -> None:
    """Raise on all ranks if one of them has an error; cheap enough for every step without one.

    Args:
        error: this rank's error, which it raises.  Ranks without one raise ValueError or OSError
            with the first failed rank's message.
        what: what ranks could not do, a verb and its object.
        groups: those that together reach the ranks, one after the other.
    """
    count = total(int(error is not None), groups)
    if not count:
        return
    kind = ValueError if isinstance(error, ValueError) else OSError
    failed = [] if error is None else [(rank(), kind, f"{type(error).__name__}: {error}")]
    for group in groups:
        failed = [one for of_rank in gathered(failed, group) for one in of_rank]
    if error is not None:
        raise error
    number, kind, text = failed[0]
    raise kind(f"{count} other rank(s) could not {what}; rank {number}: {text}")
