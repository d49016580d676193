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


def test_initialize_with_our_object_under_offload_names_the_setting(ranks):
    for rank in ranks:  # in DeepSpeed's own words
        assert SETTING in rank["object, forced"][1]


def test_assert_active_with_our_optimizer_returns(ranks):
    for rank in ranks:
        assert rank["deepspeed is late"] is True  # later than the object that is early
        assert rank["early object"] is rank["config"] is None


WRONG = {
    "other type": ["steps with AdamW, not", 'says "type": "adamw"', '"type": "Adam8bitBlockwise"'],
    "other object": ["steps with SGD, not", "given to deepspeed.initialize", "and make no"],
    "other object, forced": ["steps with SGD, not", "given to deepspeed.initialize", SETTING],
    "one rank": ["steps with AdamW, not", "(ranks [1] of 2)"],
    "no optimizer": ["steps with no optimizer, not", '"type": "Adam8bitBlockwise"'],
    "no engine": ["got a Linear, expected a DeepSpeed engine"],
    "other mode": ["super_offload", "set it to false"],
}


@pytest.mark.parametrize("name", WRONG)
def test_assert_active_with_another_raises_alike_on_all_ranks(ranks, name):
    assert ranks[0][name] == ranks[1][name]
    kind, message = ranks[0][name]
    assert kind == "RuntimeError"
    for part in WRONG[name]:
        assert part in message


# The last as Accelerate's `prepare` does under offload: it replaces the object that it is given.
OTHERS = {
    "dropped": ("AdamW", '"type": "Adam8bitBlockwise"'),
    "kept": ("AdamW", '"type": "Adam8bitBlockwise"'),
    "replaced": ("DeepSpeedCPUAdam", SETTING),
}


@pytest.mark.parametrize("name", OTHERS)
def test_engine_that_would_step_with_another_than_was_made_raises_alike_on_all_ranks(ranks, name):
    assert ranks[0][name] == ranks[1][name]
    (kind, message), (other, remedy) = ranks[0][name], OTHERS[name]
    assert kind == "ValueError" and remedy in message
    assert f"would step with {other}, not with the Adam8bitBlockwise that was made for" in message


@pytest.mark.parametrize("name", ["not made", "refused", "stepped", "taken, then another"])
def test_engine_over_parameters_of_an_optimizer_that_has_done_its_part_is_made(ranks, name):
    for rank in ranks:
        assert rank[name] is None


def test_engine_that_makes_ours_from_its_config_says_that_the_object_is_not_used(ranks):
    for rank in ranks:
        assert rank["ours twice"] is None
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
