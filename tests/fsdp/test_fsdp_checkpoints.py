# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of FSDP2 load at any world size with the same bits, and the run goes on with them.

Of narrow rows, groups that a boundary cuts at either world size are encoded anew; see
`zero8.state.narrow`, and tests/state/test_narrow.py for those.
"""

import pytest
from fsdp_checkpoints import MODES, resume, save_all
from fsdp_worker import differing

STEPS, MORE = 3, 10
RESHARDED = [(2, 1), (2, 2), (2, 3), (2, 4), (3, 2)]
QUICK = [("corrected", 2, 3, "sharded"), ("corrected", 2, 3, "broadcast")]


def slow_unless(quick: bool, *values):
    return pytest.param(*values, marks=[] if quick else pytest.mark.slow)


@pytest.fixture(scope="module")
def saved(standing_ranks, tmp_path_factory):
    """Return a function: of a layout and a world size, the folder and results of `save_all`."""
    made = {}

    def of(layout, world_size):
        if (layout, world_size) not in made:
            folder = tmp_path_factory.mktemp("checkpoints")
            arguments = {"layout": layout, "folder": folder, "steps": STEPS, "more": MORE}
            every = standing_ranks(world_size).run(save_all, **arguments)
            made[layout, world_size] = folder, every[0]
        return made[layout, world_size]

    return of


@pytest.mark.parametrize(
    ("layout", "before", "after", "mode"),
    [
        slow_unless((layout, *pair, mode) in QUICK, layout, *pair, mode)
        for layout in ("corrected", "offload")
        for pair in RESHARDED
        for mode in MODES
    ]
    + [
        slow_unless(quick, layout, *pair, mode)
        for quick, layout, *pair, mode in (
            (True, "sgd", 2, 3, "sharded"),
            (False, "lion", 3, 2, "sharded"),
            (True, "ademamix", 2, 3, "sharded"),
            (False, "ademamix", 2, 1, "sharded"),
            (False, "ademamix", 2, 3, "broadcast"),
        )
    ],
)
def test_fsdp2_checkpoint_loads_and_goes_on_with_the_same_bits(
    layout, before, after, mode, saved, standing_ranks
):
    folder, expected = saved(layout, before)
    arguments = {"layout": layout, "folder": folder, "mode": mode, "steps": STEPS, "more": MORE}
    for got in standing_ranks(after).run(resume, **arguments):
        for ours, theirs in zip(got, expected, strict=True):
            cutting = () if before == after else (before, after)
            assert differing(ours, theirs, *cutting) == []
