# SPDX-License-Identifier: Apache-2.0
"""Lion under ZeRO, by one word of the config: saved, loaded in fresh engines, gone on with."""

import pytest
from nests import difference
from zero_worker import base_optimizer, config, held, make_engine, train

CLIPPED = {"gradient_clipping": 1.0}
LAYOUTS = {
    "no zero": config(stage=0, offload=None, optimizer="Lion8bitBlockwise"),
    "zero1": config(stage=1, offload=None, optimizer="Lion8bitBlockwise"),
    "zero2 offload": config(optimizer="Lion8bitBlockwise"),
    "zero2 offload, bf16": config(dtype={}, optimizer="Lion8bitBlockwise"),
    "zero3 offload": config(stage=3, optimizer="Lion8bitBlockwise"),
}
BEFORE, AFTER = 3, 3


def train_through_and_resumed(folder):
    """Return by layout what a run holds that never stopped, and one that was saved and loaded."""
    result = {}
    for name, ds_config in LAYOUTS.items():
        engine = make_engine(ds_config | CLIPPED)
        losses = train(engine, BEFORE)
        engine.save_checkpoint(folder, tag=name)
        losses += train(engine, AFTER, first=BEFORE)
        through = {"losses": losses[BEFORE:], **held(engine)}
        engine = make_engine(ds_config | CLIPPED)
        engine.load_checkpoint(folder, tag=name)
        resumed = {"losses": train(engine, AFTER, first=BEFORE), **held(engine)}
        entries = [sorted(state) for state in base_optimizer(engine).state.values() if state]
        result[name] = through, resumed, entries, losses
    return result


@pytest.fixture(scope="module")
def ranks(standing_ranks, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("lion"))
    return standing_ranks(2).run(train_through_and_resumed, folder=folder, timeout_s=300)


@pytest.mark.parametrize("name", LAYOUTS)
def test_zero_lion_resumes_with_the_same_bits(ranks, name):
    for rank in ranks:
        through, resumed, _, losses = rank[name]
        assert difference(through, resumed) == ""
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_zero_lion_state_has_one_moment(ranks, name):
    for rank in ranks:
        assert rank[name][2]
        assert all("exp_avg_sq" not in entries for entries in rank[name][2])
