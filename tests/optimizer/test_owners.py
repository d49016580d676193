# SPDX-License-Identifier: Apache-2.0
"""Parameters gathered on one rank each, and returned to those that hold parts of them."""

import math
import os

import pytest
import torch
from ranks import error_of

from examples.gpt.engine_fsdp2 import join_ranks
from zero8.ranks.owners import Held, rounds_of

SHAPES = {11: (6, 10), 12: (4, 25), 13: (7, 3, 5), 14: (2, 6), 15: (9, 12)}
EVEN, ONE_RANK, RAGGED = "even", "one rank", "ragged"
KINDS = [EVEN, RAGGED, ONE_RANK]
DTYPES = [torch.float32, torch.bfloat16]
WRONG = ["missing at the end", "missing inside", "twice", "beyond"]


def values(identity: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a parameter, of numbers that bfloat16 holds."""
    numel = math.prod(SHAPES[identity])
    return ((torch.arange(numel) * 7 + identity) % 251).to(dtype)


def cut(kind: str, numel: int, rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of a parameter that a rank holds."""
    if kind == ONE_RANK:  # the last has all, others take part with nothing
        return ((0, numel),) if rank == size - 1 else ()
    if kind == EVEN:
        chunk = -(-numel // size)
        first = min(rank * chunk, numel)
        return ((first, min(chunk, numel - first)),) if first < numel else ()
    # Runs of 5, dealt to the ranks in turn: several on each.
    starts = range(5 * rank, numel, 5 * size)
    return tuple((first, min(5, numel - first)) for first in starts)


def held_here(kind: str) -> dict[int, Held]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    held = {}
    for owner, (identity, shape) in enumerate(SHAPES.items()):
        numel = math.prod(shape)
        if ranges := cut(kind, numel, rank, size):
            held[identity] = Held(shape, owner, float(numel), ranges)
    return held


def there_and_back(kind: str, dtype: torch.dtype) -> dict:
    """Return what this rank owned, what it had gathered, and whether its parts came back."""
    join_ranks()
    held = held_here(kind)
    wholes, came_back, owned = {}, [], []
    rounds = rounds_of(held, torch.distributed.group.WORLD)
    for one in rounds:
        owned.append(one.owned)
        here = [identity for identity in one.owned if identity in held]
        parts = [
            values(identity, dtype)[first : first + numel]
            for identity in here
            for first, numel in held[identity].ranges
        ]
        parts = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
        whole = one.gathered(parts)
        if one.own is None:
            assert whole.numel() == 0
        else:
            wholes[one.owned[one.rank]] = whole.clone(), one.own.shape
        back = one.returned(-whole)
        came_back.append(back.dtype == dtype and torch.equal(back, -parts))
    return {"owned": owned, "wholes": wholes, "came_back": came_back}


def there_and_back_in_all_ways() -> dict:
    """Return `there_and_back` by cut and dtype."""
    return {(kind, dtype): there_and_back(kind, dtype) for kind in KINDS for dtype in DTYPES}


def refused() -> dict[str, tuple[str, str] | None]:
    """Return what is raised where elements are held twice, or by no rank, by what is wrong."""
    join_ranks()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {}
    for kind in WRONG:
        ranges = cut(EVEN, 60, rank, size)
        if rank == size - 1:
            ((first, numel),) = ranges
            ranges = {
                "missing at the end": ((first, numel - 1),),
                "missing inside": ((first, 2), (first + 3, numel - 3)),
                "twice": ((first, numel), (first + 1, 1)),
                "beyond": ((first, numel + 1),),
            }[kind]
        held = {11: Held((6, 10), 0, 60.0, ranges)}
        found[kind] = error_of(rounds_of, held, torch.distributed.group.WORLD)
    return found


def nothing_at_all() -> int:
    join_ranks()
    return len(rounds_of({}, torch.distributed.group.WORLD))


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda size: f"{size} ranks")
def ranks(standing_ranks, request):
    return standing_ranks(request.param)


@pytest.fixture(scope="module")
def found(ranks):
    return ranks.run(there_and_back_in_all_ways)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_owners_gather_whole_parameters_and_return_the_parts(found, kind, dtype):
    gathered = {}
    for rank in (one[kind, dtype] for one in found):
        assert all(rank["came_back"]) and rank["owned"] == found[0][kind, dtype]["owned"]
        assert not gathered.keys() & rank["wholes"].keys()
        gathered |= rank["wholes"]
    assert gathered.keys() == SHAPES.keys()
    for identity, (whole, shape) in gathered.items():
        assert shape == SHAPES[identity]
        assert torch.equal(whole, values(identity, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_owners_have_balanced_costs(found, kind):
    """The largest is given first, each to the least: no rank has more than another by one's.

    Ranks own parameters that they hold nothing of, too.
    """
    owned = [one[kind, torch.float32]["wholes"] for one in found]
    costs = [sum(math.prod(shape) for _, shape in wholes.values()) for wholes in owned]
    assert max(costs) - min(costs) <= max(math.prod(shape) for shape in SHAPES.values())
    rounds = found[0][kind, torch.float32]["owned"]
    assert all(len(one) == len(found) for one in rounds)
    assert sorted(rounds[0]) == sorted([15, 13, 12][: len(found)])  # the most costly come first


def test_owners_of_parameters_that_are_not_whole_raise_on_all_ranks(ranks):
    for errors in ranks.run(refused):
        assert list(errors) == WRONG
        for name, text in errors.values():
            assert name == "ValueError" and "of a parameter of 60 elements" in text


def test_owners_of_nothing_have_no_rounds(ranks):
    assert set(ranks.run(nothing_at_all)) == {0}
