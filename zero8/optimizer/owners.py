# SPDX-License-Identifier: Apache-2.0
"""Gathers matrices that are cut between ranks, each on one rank, its owner, and returns them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from zero8.environment.at_exit import wait_for_gloo_at_exit
from zero8.environment.ranks import Group, device_of
from zero8.spec.muon import matrices_of, multiplications

Key = tuple[int, int]
"""A matrix: the identity of its parameter, and the number of the matrix in it."""

Ranges = tuple[tuple[int, int], ...]
"""Elements of a matrix, as (first, number of elements) of each run."""


@dataclass(frozen=True)
class Held:
    """What a rank holds of a parameter.

    Attributes:
        shape: the whole parameter's.
        like: the index among the parameters of the step of the first that has the same settings.
        ranges: the elements on this rank, of each matrix, by its number.
    """

    shape: tuple[int, ...]
    like: int
    ranges: Mapping[int, Ranges]


@dataclass(frozen=True)
class Round:
    """Matrices of one shape that are gathered at once.

    Attributes:
        group: the ranks that share them, None for this rank alone.
        owned: the matrices that each rank gathers.
        held: what each rank holds, of the matrices of all rounds.
    """

    group: Group
    owned: Sequence[Sequence[Key]]
    held: Sequence[Mapping[int, Held]]

    def replace(self, views: Sequence[Tensor], f: Callable[[Tensor], Tensor]) -> None:
        """Replace the elements of matrices by those of a function of whole matrices.

        All ranks of the group must call it.  `views` are this rank's ranges of the matrices, in the
        order of `owned`, all of one dtype; at least one tensor, which may be empty.  `f` gets this
        rank's own matrices, (elements,) one after the other.
        """
        if self.group is None:
            return fill(views, f(torch.cat(list(views))))
        rank = distributed.get_rank(self.group)
        mine, here = self.owned[rank], self.held[rank]
        sent = [sum(n for key in keys for _, n in _ranges(here, key)) for keys in self.owned]
        received = [sum(n for key in mine for _, n in _ranges(held, key)) for held in self.held]
        back = arrived = self._exchanged(torch.cat(list(views)), sent, received)
        if mine:
            size = sum(received) // len(mine)
            whole = torch.empty_like(arrived)
            parts = [
                whole[place * size + first :][:numel]
                for held in self.held
                for place, key in enumerate(mine)
                for first, numel in _ranges(held, key)
            ]
            fill(parts, arrived)
            fill([whole], f(whole))
            back = torch.cat(parts)
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


def rounds_of(
    held: Mapping[int, Held], group: Group, max_numel: int
) -> list[tuple[list[int], list[Round]]]:
    """Return parameters to step together, of one shape and settings, with the rounds for them.

    All ranks of the group must call it; None is this rank alone.  Each matrix goes to the one of
    its holders that has the least to compute so far.  A rank gathers at most `max_numel` elements
    in a round, unless one matrix has more.  Raises ValueError on all ranks if they do not hold all
    of a matrix.
    """
    of_ranks: list[Any] = [held]
    if group is not None:
        of_ranks *= distributed.get_world_size(group)
        wait_for_gloo_at_exit()
        distributed.all_gather_object(of_ranks, dict(held), group=group)
    costs = [0] * len(of_ranks)
    found = []
    for (shape, _), identities in _alike(of_ranks):
        matrices, rows, columns = matrices_of(shape)
        at_once = max(1, max_numel // (rows * columns))
        together = max(1, at_once * len(of_ranks) // matrices)
        for start in range(0, len(identities), together):
            some, owned = identities[start : start + together], [list[Key]() for _ in of_ranks]
            for key, holders in _keys_of(some, of_ranks):
                numel = sum(n for rank in holders for _, n in _ranges(of_ranks[rank], key))
                if numel != rows * columns:
                    raise ValueError(
                        f"got ranks that together hold {numel} elements of a matrix of "
                        f"{rows * columns}, expected each element on one rank"
                    )
                owner = min(holders, key=lambda rank: (costs[rank], rank))
                owned[owner].append(key)
                costs[owner] += multiplications((rows, columns))
            rounds = [
                Round(group, [keys[first : first + at_once] for keys in owned], of_ranks)
                for first in range(0, max(map(len, owned)), at_once)
            ]
            found.append((some, rounds))
    return found


def _alike(
    of_ranks: Sequence[Mapping[int, Held]],
) -> list[tuple[tuple[tuple[int, ...], int], list[int]]]:
    """Return the parameters by shape and settings, the most costly first."""
    alike: dict[tuple[tuple[int, ...], int], dict[int, None]] = {}
    for held in of_ranks:
        for identity, one in held.items():
            alike.setdefault((one.shape, one.like), {})[identity] = None
    pairs = sorted(alike.items(), key=lambda pair: -multiplications(pair[0][0]))
    return [(kind, list(identities)) for kind, identities in pairs]


def _keys_of(
    identities: Sequence[int], of_ranks: Sequence[Mapping[int, Held]]
) -> Iterator[tuple[Key, list[int]]]:
    """Yield the matrices of parameters that are cut, each with the ranks that hold parts of it."""
    for identity in identities:
        numbers = {n for held in of_ranks if identity in held for n in held[identity].ranges}
        for key in ((identity, number) for number in sorted(numbers)):
            yield key, [rank for rank, held in enumerate(of_ranks) if _ranges(held, key)]


def _ranges(held: Mapping[int, Held], key: Key) -> Ranges:
    identity, number = key
    return held[identity].ranges.get(number, ()) if identity in held else ()
