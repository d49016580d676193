# SPDX-License-Identifier: Apache-2.0
"""What all ranks have to know before any of them goes on; every rank must call these."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import distributed

T = TypeVar("T")


def gathered(value: T) -> list[T]:
    """Return the values of all ranks, small and picklable, in the order of the ranks."""
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def from_rank_0(function: Callable[[], T]) -> T:
    """Return on all ranks what a function returns on rank 0, which alone calls it.

    Raises:
        OSError, ValueError: what rank 0's call raised, on all ranks.
    """
    told: list[Any] = [None, None]
    if distributed.get_rank() == 0:
        try:
            told[0] = function()
        except FileNotFoundError as error:
            told[1] = FileNotFoundError(str(error))
        except OSError as error:
            told[1] = OSError(str(error))
        except ValueError as error:
            told[1] = ValueError(str(error))
    distributed.broadcast_object_list(told)
    if told[1] is not None:
        raise told[1]
    return told[0]


def raise_together(error: Exception | None, what: str) -> None:
    """Raise, on all ranks, if one of them has an error.

    Args:
        error: this rank's, which it then raises; the others raise one of the same kind, ValueError
            or OSError, that says which rank had which.
        what: was tried, for the message.
    """
    kind = ValueError if isinstance(error, ValueError) else OSError
    texts = gathered(None if error is None else (kind, f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    failed = [(rank, *told) for rank, told in enumerate(texts) if told is not None]
    if failed:
        rank, kind, text = failed[0]
        raise kind(f"{what}: {len(failed)} rank(s) could not, rank {rank}: {text}")


@contextmanager
def replaced(thing: object, name: str, value: object) -> Iterator[None]:
    """Give one object, not its class, another attribute during the block."""
    assert name not in vars(thing), name
    setattr(thing, name, value)
    try:
        yield
    finally:
        delattr(thing, name)
