# SPDX-License-Identifier: Apache-2.0
"""Nobody trains with another optimizer than they asked for without being told."""

import pytest
from active_worker import try_everything
from ranks import run_ranks

SETTING = '"zero_force_ds_cpu_optimizer": false'
BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "steps_per_print": 1000000,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("active")
    return run_ranks(try_everything, 2, folder, timeout_s=400, imports="torch._dynamo", base=BASE)


TYPE = '"type": "Adam8bitBlockwise"'
DROPPED = ["would step with AdamW, not with the Adam8bitBlockwise that was made for", TYPE]
# What a way to get an optimizer raises: nothing, or what is in its message.
WAYS = {
    "early object": None,
    "config": None,
    "ours twice": None,
    "not made": None,
    "refused": None,
    "stepped": None,
    "taken, then another": None,
    "object, forced": [SETTING],  # in DeepSpeed's own words
    "other type": ["steps with AdamW, not", TYPE],
    "other object": ["steps with SGD, not", "make no optimizer object", SETTING],
    "one rank": ["steps with AdamW, not", "(ranks [1] of 2)"],
    "no optimizer": ["steps with no optimizer, not", TYPE],
    "no engine": ["got a Linear, expected a DeepSpeed engine"],
    "dropped": DROPPED,
    "kept": DROPPED,
    # As Accelerate's `prepare` does under offload: it replaces the object that it is given.
    "replaced": ["would step with DeepSpeedCPUAdam, not with the Adam8bitBlockwise", SETTING],
}


@pytest.mark.parametrize("name", WAYS)
def test_engine_steps_with_ours_or_raises_alike_on_all_ranks(ranks, name):
    assert ranks[0][name] == ranks[1][name]
    if WAYS[name] is None:
        assert ranks[0][name] is None
    else:
        assert all(part in ranks[0][name][1] for part in WAYS[name]), ranks[0][name]


def test_engine_that_makes_ours_from_its_config_says_that_the_object_is_not_used(ranks):
    for rank in ranks:
        assert rank["deepspeed is late"] is True  # later than the object that is early
        assert any("that it made from its config" in message for message in rank["said"])
