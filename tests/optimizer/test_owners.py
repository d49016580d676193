# SPDX-License-Identifier: Apache-2.0
"""Matrices that ranks do not hold whole are refused; test_fsdp_muon.py has those that they do."""

import os

import pytest
import torch
from ranks import error_of

from examples.gpt.engines import join_ranks
from zero8.optimizer.owners import Held, rounds_of

MAX_NUMEL = 60
WRONG = ["missing at the end", "missing inside", "twice", "beyond"]


def cut(numel, rank, size):
    """Return the ranges of a matrix that a rank holds."""
    chunk = -(-numel // size)
    first = min(rank * chunk, numel)
    return ((first, min(chunk, numel - first)),)


def refused():
    """Return what is raised where elements are held twice, or by no rank; and rounds of nothing."""
    join_ranks()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
    for kind in WRONG:
        ranges = cut(60, rank, size)
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


def test_owners_of_matrices_that_are_not_whole_raise_on_all_ranks(ranks):
    for errors, rounds_of_nothing in ranks.run(refused):
        assert rounds_of_nothing == []
        for name, text in errors:
            assert name == "ValueError" and "of a matrix of 60" in text
