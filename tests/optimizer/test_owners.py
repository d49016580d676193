# SPDX-License-Identifier: Apache-2.0
"""Matrices that ranks hold parts of; tests of Muon under ZeRO and FSDP2 gather and return them."""

import pytest
import torch
from ranks import error_of

from examples.gpt.engines import join_ranks
from zero8.optimizer.owners import Held, rounds_of

# What the last rank holds in the place of its range.
WRONG = {
    "missing at the end": lambda first, numel: ((first, numel - 1),),
    "missing inside": lambda first, numel: ((first, 2), (first + 3, numel - 3)),
    "twice": lambda first, numel: ((first, numel), (first + 1, 1)),
    "beyond": lambda first, numel: ((first, numel + 1),),
}


def refused():
    """Return what is raised where elements are held twice, or by no rank; and rounds of nothing."""
    join_ranks()
    world = torch.distributed.group.WORLD
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    numel, found = 60 // size, []
    for wrong in WRONG.values():
        first = rank * numel
        ranges = wrong(first, numel) if rank == size - 1 else ((first, numel),)
        found.append(error_of(rounds_of, {11: Held((6, 10), 0, {0: ranges})}, world, 48))
    return found, rounds_of({}, world, 48)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_owners_of_matrices_that_are_not_whole_raise_on_all_ranks(num_ranks, standing_ranks):
    for errors, rounds_of_nothing in standing_ranks(num_ranks).run(refused):
        assert rounds_of_nothing == []
        for name, text in errors:
            assert name == "ValueError" and "of a matrix of 60" in text
