# SPDX-License-Identifier: Apache-2.0
"""Steps behind the next forward under FSDP2 have the bits of steps in the call."""

import fsdp_forward
import pytest
from nests import assert_same

EVENTS = [
    "clipped",
    "rarely used",
    "other order",
    "activation checkpointing",
    "prefetch",
    "accumulation",
    "gradients set to zero",
    "evaluation",
    "saved and loaded",
    "reported",
    "removed",
]
ROWS = [
    *((event, 2, False) for event in EVENTS),
    ("clipped", 1, True),
    ("other order", 3, True),
]


@pytest.mark.parametrize(("event", "size", "mixed"), ROWS)
def test_fsdp2_step_behind_the_forward_has_the_bits_of_one_in_the_call(
    event, size, mixed, standing_ranks
):
    run = standing_ranks(size).run
    expected = run(fsdp_forward.trained, event=event, is_behind=False, mixed=mixed)
    got = run(fsdp_forward.trained, event=event, is_behind=True, mixed=mixed)
    assert_same(got, expected)


@pytest.mark.parametrize(("way", "step"), [("step_in_forward", 2), ("step_in_backward", 1)])
def test_fsdp2_step_that_fails_beside_the_calls_is_raised_by_the_next_on_all_ranks(
    way, step, standing_ranks
):
    mine, theirs = standing_ranks(2).run(fsdp_forward.failing, way=way)
    assert mine[step] == "ValueError: bad"
    told = theirs[step]
    assert told.startswith("ValueError: 1 other rank(s) could not take the optimizer's step")
    assert told.endswith("rank 0: ValueError: bad")
    assert not any(text for raised in (mine, theirs) for text in raised[:step] + raised[step + 1 :])


def test_step_in_forward_that_cannot_be_is_refused(standing_ranks):
    (messages,) = standing_ranks(1).run(fsdp_forward.refused)
    expected = ("a model without fully_shard", "none of whose sharded parameters", "got Muon")
    for message, words in zip(messages, expected, strict=True):
        assert words in message and "expected" in message or "make the optimizer" in message
