# SPDX-License-Identifier: Apache-2.0
"""Agreement between ranks: an error of one is raised on all.  Every rank must call these.

Without a process group, the process is the only rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import distributed

from zero8.environment import numbers
from zero8.environment.at_exit import wait_for_gloo_at_exit

T = TypeVar("T")


def gathered(value: T, group: numbers.Group = None) -> list[T]:
    """Return the (small, picklable) values of all ranks of a group, in the order of the ranks."""
    if numbers.is_alone():
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
    if numbers.is_alone():
        return function()
    answer: list[Any] = [None, None]
    if numbers.rank() == 0:
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
    error: BaseException | None, what: str, groups: Sequence[numbers.Group] = (None,)
) -> None:
    """Raise on all ranks if one of them has an error; cheap enough for every step without one.

    Args:
        error: this rank's error, which it raises.  Ranks without one raise ValueError or OSError
            with the first failed rank's message.
        what: what ranks could not do, a verb and its object.
        groups: those that together reach the ranks, one after the other.
    """
    count = numbers.total(int(error is not None), groups)
    if not count:
        return
    kind = ValueError if isinstance(error, ValueError) else OSError
    failed = [] if error is None else [(numbers.rank(), kind, f"{type(error).__name__}: {error}")]
    for group in groups:
        failed = [one for of_rank in gathered(failed, group) for one in of_rank]
    if error is not None:
        raise error
    rank, kind, text = failed[0]
    raise kind(f"{count} other rank(s) could not {what}; rank {rank}: {text}")
