# SPDX-License-Identifier: Apache-2.0
"""Nobody trains with another optimizer than they asked for without being told."""

import importlib
import sys

import pytest
from active_worker import try_everything
from ranks import run_ranks

from zero8.deepspeed.when_imported import when_imported

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


@pytest.fixture
def module_file(tmp_path, monkeypatch):
    (tmp_path / "imported_by_test.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "imported_by_test"
    sys.modules.pop("imported_by_test", None)


def test_when_imported_calls_once_after_the_module_has_run(module_file):
    seen = []

    def look(module):
        seen.append(module.value)

    finders = len(sys.meta_path)
    when_imported(module_file, look)
    assert seen == []
    module = importlib.import_module(module_file)
    assert module.__loader__ is module.__spec__.loader
    assert type(module.__loader__).__module__ != "zero8.deepspeed.when_imported"
    importlib.reload(module)  # by a loader that others may share: not ours to change
    assert (seen, len(sys.meta_path)) == ([3], finders)
    when_imported(module_file, look)
    assert seen == [3, 3]
