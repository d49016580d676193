# SPDX-License-Identifier: Apache-2.0
"""Matrices gathered on one rank each, and returned to those that hold parts of them."""

import math
import os

import pytest
import torch
from ranks import error_of

from examples.gpt.engine_fsdp2 import join_ranks
from zero8.optimizer.owners import Held, Key, rounds_of

SHAPES = {(11, 0): (6, 10), (12, 0): (4, 25), (13, 0): (7, 15), (14, 0): (2, 6), (15, 0): (9, 12)}
EXPERTS = {(16, number): (4, 6) for number in range(7)}
SHAPES |= EXPERTS
MAX_NUMEL = 2 * 4 * 6  # two experts
EVEN, ONE_RANK, RAGGED = "even", "one rank", "ragged"
KINDS = [EVEN, RAGGED, ONE_RANK]
DTYPES = [torch.float32, torch.bfloat16]
WRONG = ["missing at the end", "missing inside", "twice", "beyond"]


def values(key: Key, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix, of numbers that bfloat16 holds."""
    numel = math.prod(SHAPES[key])
    return ((torch.arange(numel) * 7 + sum(key)) % 251).to(dtype)


def cut(kind: str, numel: int, rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of a matrix that a rank holds."""
    if kind == ONE_RANK:  # the last has all, others take part with nothing
        return ((0, numel),) if rank == size - 1 else ()
    if kind == EVEN:
        chunk = -(-numel // size)
        first = min(rank * chunk, numel)
        return ((first, min(chunk, numel - first)),) if first < numel else ()
    # Runs of 5, dealt to the ranks in turn: several on each.
    starts = range(5 * rank, numel, 5 * size)
    return tuple((first, min(5, numel - first)) for first in starts)


def held_here(kind: str) -> dict[Key, Held]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    held = {}
    for key, shape in SHAPES.items():
        numel = math.prod(shape)
        if ranges := cut(kind, numel, rank, size):
            held[key] = Held(shape, key[0], float(numel), ranges)
    return held


def there_and_back(kind: str, dtype: torch.dtype) -> dict:
    """Return what this rank owned, what it had gathered, and whether its parts came back."""
    join_ranks()
    held = held_here(kind)
    wholes, came_back, owned = {}, [], []
    rounds = rounds_of(held, torch.distributed.group.WORLD, MAX_NUMEL)
    for one in rounds:
        owned.append(one.owned)
        here = [key for keys in one.owned for key in keys if key in held]
        parts = [
            values(key, dtype)[first : first + numel]
            for key in here
            for first, numel in held[key].ranges
        ]
        views = [torch.empty(0, dtype=dtype), *(part.clone() for part in parts)]

        def negative(whole, own, keys=one.owned[one.rank]):
            matrices = whole.clone().view(-1, *own.shape)
            wholes.update(zip(keys, matrices, strict=True))
            return -whole

        one.replace(views, negative)
        assert (one.own is None) == (not one.owned[one.rank])
        pairs = zip(views[1:], parts, strict=True)
        came_back.append(all(torch.equal(view, -part) for view, part in pairs))
    return {"owned": owned, "wholes": wholes, "came_back": came_back, "held": set(held)}


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
        held = {(11, 0): Held((6, 10), 0, 60.0, ranges)}
        found[kind] = error_of(rounds_of, held, torch.distributed.group.WORLD, MAX_NUMEL)
    return found


def nothing_at_all() -> int:
    join_ranks()
    return len(rounds_of({}, torch.distributed.group.WORLD, MAX_NUMEL))


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda size: f"{size} ranks")
def ranks(standing_ranks, request):
    return standing_ranks(request.param)


@pytest.fixture(scope="module")
def found(ranks):
    return ranks.run(there_and_back_in_all_ways)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_owners_gather_whole_matrices_and_return_the_parts(found, kind, dtype):
    gathered = {}
    for rank in (one[kind, dtype] for one in found):
        assert all(rank["came_back"]) and rank["owned"] == found[0][kind, dtype]["owned"]
        assert not gathered.keys() & rank["wholes"].keys()
        gathered |= rank["wholes"]
    assert gathered.keys() == SHAPES.keys()
    for key, whole in gathered.items():
        assert torch.equal(whole, values(key, dtype).view(SHAPES[key]))


@pytest.mark.parametrize("kind", [EVEN, RAGGED])
def test_owners_have_balanced_costs(found, kind):
    """The largest is given first, each to the least: no rank has more than another by one's."""
    owned = [one[kind, torch.float32]["wholes"] for one in found]
    costs = [sum(whole.numel() for whole in wholes.values()) for wholes in owned]
    assert max(costs) - min(costs) <= max(math.prod(shape) for shape in SHAPES.values())
    rounds = found[0][kind, torch.float32]["owned"]
    assert all(len(one) == len(found) for one in rounds)
    largest = [((one, 0),) for one in (15, 13, 12)]
    assert sorted(rounds[0]) == sorted(largest[: len(found)])  # the most costly come first


@pytest.mark.parametrize("kind", KINDS)
def test_owners_hold_a_part_of_what_they_own(found, kind):
    """Others would receive all of it, and not the parts of others alone."""
    for one in found:
        assert one[kind, torch.float32]["wholes"].keys() <= one[kind, torch.float32]["held"]


@pytest.mark.parametrize("kind", KINDS)
def test_owners_gather_small_equal_matrices_together(found, kind):
    for rank in range(len(found)):
        sets = [keys for one in found[rank][kind, torch.float32]["owned"] for keys in one]
        together = [set(keys) for keys in sets if len(keys) > 1]
        assert together and all(keys <= EXPERTS.keys() for keys in together)
        assert max(map(len, together)) == 2


def test_owners_of_matrices_that_are_not_whole_raise_on_all_ranks(ranks):
    for errors in ranks.run(refused):
        assert list(errors) == WRONG
        for name, text in errors.values():
            assert name == "ValueError" and "of a matrix of 60 elements" in text


def test_owners_of_nothing_have_no_rounds(ranks):
    assert set(ranks.run(nothing_at_all)) == {0}
