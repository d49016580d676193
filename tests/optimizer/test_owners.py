# SPDX-License-Identifier: Apache-2.0
"""Matrices gathered on one rank each, and returned to those that hold parts of them."""

import math
import os

import pytest
import torch
from ranks import error_of

from examples.gpt.engines import join_ranks
from zero8.optimizer.owners import Held, rounds_of
from zero8.spec.muon import matrices_of

SHAPES = {11: (6, 10), 12: (4, 25), 13: (6, 10), 14: (2, 6), 15: (6, 10), 16: (7, 4, 6)}
MAX_NUMEL = 2 * 4 * 6  # two experts
EVEN, ONE_RANK, RAGGED = "even", "one rank", "ragged"
DTYPES = [torch.float32, torch.bfloat16]
WRONG = ["missing at the end", "missing inside", "twice", "beyond"]


def values(key, dtype):
    """Return a matrix, of numbers that bfloat16 holds."""
    numel = math.prod(matrices_of(SHAPES[key[0]])[1:])
    return ((torch.arange(numel) * 7 + sum(key)) % 251).to(dtype)


def cut(kind, numel, rank, size):
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


def held_here(kind):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    held = {}
    for identity, shape in SHAPES.items():
        matrices, rows, columns = matrices_of(shape)
        ranges = {number: cut(kind, rows * columns, rank, size) for number in range(matrices)}
        if any(ranges.values()):
            held[identity] = Held(shape, 0, {n: one for n, one in ranges.items() if one})
    return held


def there_and_back(kind, dtype):
    """Return what this rank owned, what it had gathered, and whether its parts came back."""
    held, wholes, owned = held_here(kind), {}, []
    for identities, rounds in rounds_of(held, torch.distributed.group.WORLD, MAX_NUMEL):
        for one in rounds:
            mine = one.owned[torch.distributed.get_rank()]
            owned.append(mine)
            keys = [key for keys in one.owned for key in keys]
            assert {identity for identity, _ in keys} <= set(identities)
            parts = [
                values((identity, number), dtype)[first : first + numel]
                for identity, number in keys
                for first, numel in held.get(identity, Held((), 0, {})).ranges.get(number, ())
            ]
            views = [torch.empty(0, dtype=dtype), *(part.clone() for part in parts)]

            def negative(whole, keys=mine):
                wholes.update(zip(keys, whole.clone().view(len(keys), -1), strict=True))
                return -whole

            one.replace(views, negative)
            pairs = zip(views[1:], parts, strict=True)
            assert all(torch.equal(view, -part) for view, part in pairs)
    return {"owned": owned, "wholes": wholes, "held": set(held)}


def there_and_back_in_all_ways():
    join_ranks()
    kinds = (EVEN, RAGGED, ONE_RANK)
    return {(kind, dtype): there_and_back(kind, dtype) for kind in kinds for dtype in DTYPES}


def refused():
    """Return what is raised where elements are held twice, or by no rank; and rounds of nothing."""
    join_ranks()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
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
        held = {11: Held((6, 10), 0, {0: ranges})}
        found.append(error_of(rounds_of, held, torch.distributed.group.WORLD, MAX_NUMEL))
    return found, rounds_of({}, torch.distributed.group.WORLD, MAX_NUMEL)


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda size: f"{size} ranks")
def ranks(standing_ranks, request):
    return standing_ranks(request.param)


def test_owners_gather_whole_matrices_that_they_hold_a_part_of_and_return_the_parts(ranks):
    """Small equal ones together; none has more to compute than another by one matrix."""
    found = ranks.run(there_and_back_in_all_ways)
    for kind, dtype in found[0]:
        of_ranks = [one[kind, dtype] for one in found]
        gathered = {}
        for rank in of_ranks:
            assert not gathered.keys() & rank["wholes"].keys()
            assert {identity for identity, _ in rank["wholes"]} <= rank["held"]
            gathered |= rank["wholes"]
            together = [keys for keys in rank["owned"] if len(keys) > 1]
            assert all(len(keys) == 2 and {at for at, _ in keys} == {16} for keys in together)
            assert together or not rank["wholes"]
        keys = [(at, n) for at, shape in SHAPES.items() for n in range(matrices_of(shape)[0])]
        assert gathered.keys() == set(keys)
        assert all(torch.equal(gathered[key], values(key, dtype)) for key in keys)
        costs = [sum(whole.numel() for whole in rank["wholes"].values()) for rank in of_ranks]
        assert kind == ONE_RANK or max(costs) - min(costs) <= 100


def test_owners_of_matrices_that_are_not_whole_raise_on_all_ranks(ranks):
    for errors, rounds_of_nothing in ranks.run(refused):
        assert rounds_of_nothing == []
        for name, text in errors:
            assert name == "ValueError" and "of a matrix of 60" in text
