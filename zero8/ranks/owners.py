# SPDX-License-Identifier: Apache-2.0
"""Gathers parameters that are cut between ranks, each on one rank, its owner, and returns them.

For steps that need a whole parameter.  In each round every rank owns at most one, so that the
memory of a round is one parameter and this rank's parts of as many as there are ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor, distributed

from zero8.ranks.at_exit import leave_time_for_gloo
from zero8.ranks.numbers import Group, device_of

Range = tuple[int, int]
"""The first of some consecutive elements of a parameter, and their number."""


@dataclass(frozen=True)
class Held:
    """What a rank holds of a parameter.

    Attributes:
        shape: the whole parameter's.
        owner: the index among the parameters of the step of that which has it.
        cost: of the computation on the whole parameter, in any unit.
        ranges: the elements on this rank.
    """

    shape: tuple[int, ...]
    owner: int
    cost: float
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Round:
    """Parameters that are gathered at once, by at most one on each rank.

    Attributes:
        group: the ranks that share them.
        rank: this rank's number in the group.
        owned: the identity of the parameter that each rank gathers, None for ranks without one.
        ranges: for each rank, the elements that it holds of each of `owned`.
        own: of this rank's own parameter, what a rank holds of it; None if it owns none.
    """

    group: Group
    rank: int
    owned: tuple[int | None, ...]
    ranges: tuple[tuple[tuple[Range, ...], ...], ...]
    own: Held | None

    def gathered(self, parts: Tensor) -> Tensor:
        """Return this rank's own parameter, (numel,), which is empty if it owns none.

        Args:
            parts: (elements,), this rank's ranges of all parameters, in the order of `owned`.
        """
        arrived = self._exchanged(parts, self._sent(), self._received())
        whole = arrived.new_empty(math.prod(self.own.shape) if self.own else 0)
        start = 0
        for ranges in self.ranges:
            for first, numel in ranges[self.rank]:
                whole[first : first + numel] = arrived[start : start + numel]
                start += numel
        return whole

    def returned(self, whole: Tensor) -> Tensor:
        """Return this rank's ranges of all parameters, like the `parts` of `gathered`.

        Args:
            whole: (numel,), this rank's own parameter.
        """
        pieces = [
            whole[first : first + numel]
            for ranges in self.ranges
            for first, numel in ranges[self.rank]
        ]
        leaving = torch.cat(pieces) if pieces else whole.new_empty(0)
        return self._exchanged(leaving, self._received(), self._sent())

    def _sent(self) -> list[int]:
        """Return how many elements this rank holds of each owner's parameter."""
        return [sum(numel for _, numel in ranges) for ranges in self.ranges[self.rank]]

    def _received(self) -> list[int]:
        """Return how many elements each rank holds of this rank's own parameter."""
        return [sum(numel for _, numel in ranges[self.rank]) for ranges in self.ranges]

    def _exchanged(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        item_bytes, x = x.element_size(), x.to(device_of(self.group))
        out = torch.empty(sum(received) * item_bytes, dtype=torch.uint8, device=x.device)
        leave_time_for_gloo()
        distributed.all_to_all_single(
            out,
            x.contiguous().view(torch.uint8),  # gloo exchanges bytes, and not every dtype
            [count * item_bytes for count in received],
            [count * item_bytes for count in sent],
            group=self.group,
        )
        return out.view(x.dtype)


def rounds_of(held: Mapping[int, Held], group: Group) -> list[Round]:
    """Return the rounds in which parameters are gathered.

    `owned_by` says who owns which.  All ranks of the group must call it.

    Args:
        held: what this rank holds, by the parameter's identity; ranks may hold none of a parameter.
        group: the ranks that share the parameters.

    Raises:
        ValueError: on all ranks, if the ranks do not hold every element of a parameter once.
    """
    size = distributed.get_world_size(group)
    of_ranks: list[dict[int, Held]] = [{} for _ in range(size)]
    leave_time_for_gloo()
    distributed.all_gather_object(of_ranks, dict(held), group=group)
    everywhere = {identity: one for of_rank in of_ranks for identity, one in of_rank.items()}
    for identity, one in everywhere.items():
        _check_whole(
            math.prod(one.shape), [of[identity].ranges for of in of_ranks if identity in of]
        )
    queues = owned_by({identity: one.cost for identity, one in everywhere.items()}, size)
    rank = distributed.get_rank(group)
    rounds = []
    for owned in zip_longest(*queues):
        ranges = tuple(
            tuple(of[one].ranges if one in of else () for one in owned) for of in of_ranks
        )
        mine = owned[rank]
        own = None if mine is None else everywhere[mine]
        rounds.append(Round(group, rank, owned, ranges, own))
    return rounds


def owned_by(costs: Mapping[int, float], size: int) -> list[list[int]]:
    """Return the identities of each rank's own parameters, with their costs for those of all.

    The most costly parameters are given away first, each to the rank with the least cost so far.
    """
    queues: list[list[int]] = [[] for _ in range(size)]
    totals = [0.0] * size
    for identity in sorted(costs, key=lambda one: (-costs[one], one)):
        rank = totals.index(min(totals))
        queues[rank].append(identity)
        totals[rank] += costs[identity]
    return queues


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
        f"of a parameter of {numel} elements, expected each element on one rank"
    )
