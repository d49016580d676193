# SPDX-License-Identifier: Apache-2.0
"""Gathers matrices that are cut between ranks, each on one rank, its owner, and returns them.

In each round a rank owns one matrix, or several equal ones that are small.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor, distributed

from zero8.environment.at_exit import wait_for_gloo_at_exit
from zero8.environment.numbers import Group, device_of

Key = tuple[int, int]
"""A matrix: the identity of its parameter, and the number of the matrix in it."""

Range = tuple[int, int]
"""The first of some consecutive elements of a matrix, and their number."""


@dataclass(frozen=True)
class Held:
    """What a rank holds of a matrix.

    Attributes:
        shape: the whole matrix's.
        like: the index among the parameters of the step of the first that has the same settings.
        cost: of the computation on the whole matrix, in any unit.
        ranges: the elements on this rank; at least one.
    """

    shape: tuple[int, int]
    like: int
    cost: float
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Round:
    """Matrices that are gathered at once.

    Attributes:
        group: the ranks that share them.
        rank: this rank's number in the group.
        owned: the matrices that each rank gathers; equal in shape and settings.
        held: what each rank holds, of the matrices of all rounds.
        own: what a rank holds of the first of this rank's own matrices; None if it owns none.
    """

    group: Group
    rank: int
    owned: tuple[tuple[Key, ...], ...]
    held: Sequence[Mapping[Key, Held]]
    own: Held | None

    def replace(self, views: Sequence[Tensor], f: Callable[[Tensor, Held], Tensor]) -> None:
        """Replace the elements of matrices by those of a function of whole matrices.

        All ranks of the group must call it.  `views` are this rank's ranges of the matrices, in the
        order of `owned`, all of one dtype; at least one tensor, which may be empty.  `f` gets this
        rank's own matrices, (elements,) one after the other, and `own`.
        """
        mine = self.owned[self.rank]
        sent = [_numel_of(self.held[self.rank], keys) for keys in self.owned]
        received = [_numel_of(held, mine) for held in self.held]
        back = arrived = self._exchanged(torch.cat(list(views)), sent, received)
        if self.own is not None:
            size = math.prod(self.own.shape)
            # What each rank holds of this rank's own matrices, as ranges of all of these.
            ranges = [
                (place * size + first, numel)
                for held in self.held
                for place, key in enumerate(mine)
                for first, numel in _ranges(held, key)
            ]
            whole = arrived.new_empty(len(mine) * size)
            fill([whole[first : first + numel] for first, numel in ranges], arrived)
            whole = f(whole, self.own)
            back = torch.cat([whole[first : first + numel] for first, numel in ranges])
        fill(views, self._exchanged(back, received, sent))

    def _exchanged(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        item_bytes, x = x.element_size(), x.to(device_of(self.group))
        out = torch.empty(sum(received) * item_bytes, dtype=torch.uint8, device=x.device)
        wait_for_gloo_at_exit()
        distributed.all_to_all_single(
            out,
            x.contiguous().view(torch.uint8),  # gloo exchanges bytes, and not every dtype
            [count * item_bytes for count in received],
            [count * item_bytes for count in sent],
            group=self.group,
        )
        return out.view(x.dtype)


def fill(views: Sequence[Tensor], x: Tensor) -> None:
    """Copy elements that lie one after the other to some views."""
    for view, part in zip(views, x.split([view.numel() for view in views]), strict=True):
        view.copy_(part)


def rounds_of(held: Mapping[Key, Held], group: Group, max_numel: int) -> list[Round]:
    """Return the rounds in which matrices are gathered; `owned_by` says who owns which.

    All ranks of the group must call it.  A rank gathers at most `max_numel` elements in a round,
    unless one matrix has more.

    Raises ValueError on all ranks if they do not hold every element of a matrix once.
    """
    of_ranks: list[dict[Key, Held]] = [{} for _ in range(distributed.get_world_size(group))]
    wait_for_gloo_at_exit()
    distributed.all_gather_object(of_ranks, dict(held), group=group)
    everywhere = {key: one for of_rank in of_ranks for key, one in of_rank.items()}
    holders = {key: [r for r, of in enumerate(of_ranks) if key in of] for key in everywhere}
    for key, one in everywhere.items():
        _check_whole(math.prod(one.shape), [of_ranks[r][key].ranges for r in holders[key]])
    costs = {key: one.cost for key, one in everywhere.items()}
    queues = owned_by(costs, holders, len(of_ranks))
    rank = distributed.get_rank(group)
    sets = [_sets(keys, everywhere, max_numel) for keys in queues]
    rounds = []
    for owned in zip_longest(*sets, fillvalue=()):
        own = everywhere[owned[rank][0]] if owned[rank] else None
        rounds.append(Round(group, rank, owned, of_ranks, own))
    return rounds


def owned_by(
    costs: Mapping[Key, float], holders: Mapping[Key, Collection[int]], size: int
) -> list[list[Key]]:
    """Return each rank's own matrices, from the cost of each and the ranks that hold a part of it.

    The most costly are given away first, each to the one of its holders with the least cost so far.
    """
    queues: list[list[Key]] = [[] for _ in range(size)]
    totals = [0.0] * size
    for key in sorted(costs, key=lambda one: (-costs[one], one)):
        rank = min(holders[key], key=lambda one: (totals[one], one))
        queues[rank].append(key)
        totals[rank] += costs[key]
    return queues


def _sets(
    keys: Sequence[Key], everywhere: Mapping[Key, Held], max_numel: int
) -> Iterator[tuple[Key, ...]]:
    """Yield a rank's own matrices, those of equal shape and settings together."""
    alike: dict[tuple[tuple[int, int], int], list[Key]] = {}
    for key in keys:
        one = everywhere[key]
        alike.setdefault((one.shape, one.like), []).append(key)
    for (shape, _), those in alike.items():
        count = max(1, max_numel // math.prod(shape))
        for start in range(0, len(those), count):
            yield tuple(those[start : start + count])


def _ranges(held: Mapping[Key, Held], key: Key) -> tuple[Range, ...]:
    return held[key].ranges if key in held else ()


def _numel_of(held: Mapping[Key, Held], keys: Sequence[Key]) -> int:
    return sum(numel for key in keys for _, numel in _ranges(held, key))


def _check_whole(numel: int, held: Sequence[Sequence[Range]]) -> None:
    end = 0
    for first, count in sorted(one for ranges in held for one in ranges):
        if first != end:
            break
        end += count
    else:
        if end == numel:
            return
    raise ValueError(
        f"got ranks that together hold {sorted(one for ranges in held for one in ranges)[:4]}... "
        f"of a matrix of {numel} elements, expected each element on one rank"
    )
