# SPDX-License-Identifier: Apache-2.0
"""Lion and SGD under ZeRO, by one word of the config: saved, loaded in fresh engines, gone on."""

import pytest
import torch
from nests import difference
from zero_worker import Model, base_optimizer, config, held, make_engine, train

from zero8.checkpoint.commands.convert import convert

CLIPPED = {"gradient_clipping": 1.0}
LION = {"optimizer": "Lion8bitBlockwise"}
SGD = {"optimizer": "SGD8bitBlockwise", "momentum": 0.9, "nesterov": True, "lr": 0.1}
LAYOUTS = {
    "no zero": config(stage=0, offload=None, **LION),
    "zero1": config(stage=1, offload=None, **LION),
    "zero2 offload": config(**LION),
    "zero2 offload, bf16": config(dtype={}, **LION),
    "zero3 offload": config(stage=3, **LION),
    "SGD, no zero": config(stage=0, offload=None, **SGD),
    "SGD, zero2 offload, bf16": config(dtype={}, **SGD),
    "SGD, zero3 offload": config(stage=3, **SGD),
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
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("one_moment")


@pytest.fixture(scope="module")
def ranks(standing_ranks, folder):
    return standing_ranks(2).run(train_through_and_resumed, folder=str(folder), timeout_s=300)


@pytest.mark.parametrize("name", LAYOUTS)
def test_zero_one_moment_resumes_with_the_same_bits(ranks, name):
    for rank in ranks:
        through, resumed, _, losses = rank[name]
        assert difference(through, resumed) == ""
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_zero_one_moment_state_has_one_moment(ranks, name):
    expected = "momentum_buffer" if "SGD" in name else "exp_avg"
    for rank in ranks:
        assert rank[name][2]
        for entries in rank[name][2]:
            found = {entry.removesuffix("_q8").removesuffix("_scale") for entry in entries}
            assert found - {"step", "format"} == {expected}


@pytest.mark.parametrize("name", ["zero2 offload, bf16", "SGD, zero3 offload"])
def test_zero_one_moment_checkpoint_converts_to_fp32_with_all_parameters(
    ranks, folder, name, tmp_path
):
    """By names, from the partitions of both ranks."""
    convert(folder / name, tmp_path / "fp32", "fp32")
    content = torch.load(tmp_path / "fp32", weights_only=True)["optimizer"]
    names = content["param_groups"][0]["param_names"]
    expected = "momentum_buffer" if "SGD" in name else "exp_avg"
    assert sorted(names) == sorted(name for name, _ in Model().named_parameters())
    for state in content["state"].values():
        assert int(state["step"]) == BEFORE
        assert state[expected].abs().max() > 0
