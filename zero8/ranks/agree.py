# SPDX-License-Identifier: Apache-2.0
"""What all ranks have to know before any of them goes on; every rank must call these.

In one process without a process group they work as on one rank.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

from zero8.ranks import numbers

T = TypeVar("T")


def gathered(value: T) -> list[T]:
    """Return the values of all ranks, small and picklable, in the order of the ranks."""
    values: list[Any] = [value] * numbers.num_ranks()
    if not numbers.is_alone():
        distributed.all_gather_object(values, value)
    return values


def from_rank_0(function: Callable[[], T]) -> T:
    """Return on all ranks what a function returns on rank 0, which alone calls it.

    Raises:
        OSError, ValueError: what rank 0's call raised, on all ranks; RuntimeError for others.  In
            one process: whatever it raises.
    """
    if numbers.is_alone():
        return function()
    answer: list[Any] = [None, None]
    if numbers.rank() == 0:
        try:
            answer[0] = function()
        except OSError as error:
            answer[1] = OSError(str(error))
        except ValueError as error:
            answer[1] = ValueError(str(error))
        except Exception as error:  # whatever it is, the others wait for it
            answer[1] = RuntimeError(f"{type(error).__name__}: {error}")
    distributed.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


def raise_together(error: Exception | None, what: str) -> None:
    """Raise, on all ranks, if one of them has an error; the others say what it was.

    Args:
        error: this rank's, which it then raises; the others raise one of the same kind, ValueError
            or OSError, that says which rank had which.
        what: was tried, for the message.
    """
    kind = ValueError if isinstance(error, ValueError) else OSError
    texts = gathered(None if error is None else (kind, f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    failed = [(rank, *text) for rank, text in enumerate(texts) if text is not None]
    if failed:
        rank, kind, text = failed[0]
        raise kind(f"{what}: {len(failed)} rank(s) could not, rank {rank}: {text}")


def raise_together_quickly(error: Exception | None, what: str) -> None:
    """Do what `raise_together` does by one all_reduce of 8 bytes, which every step can afford.

    The other ranks raise OSError, and do not say what the error was.
    """
    count = numbers.total(int(error is not None), [None])
    if error is not None:
        raise error
    if count:
        raise OSError(f"{count} other rank(s) could not {what}; see their messages")
