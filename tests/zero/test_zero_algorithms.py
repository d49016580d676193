# SPDX-License-Identifier: Apache-2.0
"""Other algorithms than Adam under ZeRO: saved, loaded in fresh engines, gone on with."""

import pytest
import torch
from nests import difference
from zero_worker import Model, base_optimizer, config, held, make_engine, train

import zero8
from zero8.checkpoint.commands.convert import convert

CLIPPED = {"gradient_clipping": 1.0}
LION = {"optimizer": "Lion8bitBlockwise"}
SGD = {"optimizer": "SGD8bitBlockwise", "momentum": 0.9, "nesterov": True, "lr": 0.1}
MIX = {"optimizer": "AdEMAMix8bitBlockwise", "t_alpha": 4, "t_beta3": 4}
LAYOUTS = {
    "no zero": config(stage=0, offload=None, **LION),
    "zero1": config(stage=1, offload=None, **LION),
    "zero2 offload": config(**LION),
    "zero2 offload, bf16": config(dtype={}, **LION),
    "zero3 offload": config(stage=3, **LION),
    "SGD, no zero": config(stage=0, offload=None, **SGD),
    "SGD, zero2 offload, bf16": config(dtype={}, **SGD),
    "SGD, zero3 offload": config(stage=3, **SGD),
    "AdEMAMix, zero2 offload, bf16": config(dtype={}, **MIX),
    "AdEMAMix, zero3 offload": config(stage=3, **MIX),
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


def algorithm_of(name):
    section = LAYOUTS[name]["optimizer"]
    return getattr(zero8, section["type"]).algorithm


def memory_of(name):
    return {one.name for one in algorithm_of(name).memory}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("algorithms")


@pytest.fixture(scope="module")
def ranks(standing_ranks, folder):
    return standing_ranks(2).run(train_through_and_resumed, folder=str(folder), timeout_s=300)


@pytest.mark.parametrize("name", LAYOUTS)
def test_zero_algorithm_resumes_with_the_same_bits(ranks, name):
    for rank in ranks:
        through, resumed, _, losses = rank[name]
        assert difference(through, resumed) == ""
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_zero_algorithm_state_has_its_moments(ranks, name):
    expected = set(algorithm_of(name).moment_names)
    for rank in ranks:
        assert rank[name][2]
        for entries in rank[name][2]:
            found = {entry.removesuffix("_q8").removesuffix("_scale") for entry in entries}
            assert found - {"step", "format"} - memory_of(name) == expected


@pytest.mark.parametrize(
    "name", ["zero2 offload, bf16", "SGD, zero3 offload", "AdEMAMix, zero3 offload"]
)
def test_zero_algorithm_checkpoint_converts_to_fp32_with_all_parameters(
    ranks, folder, name, tmp_path
):
    """By names, from the partitions of both ranks."""
    convert(folder / name, tmp_path / "fp32", "fp32")
    content = torch.load(tmp_path / "fp32", weights_only=True)["optimizer"]
    names = content["param_groups"][0]["param_names"]
    expected = algorithm_of(name).moment_names
    assert sorted(names) == sorted(name for name, _ in Model().named_parameters())
    for state in content["state"].values():
        assert int(state["step"]) == BEFORE
        assert all(state[moment].abs().max() > 0 for moment in expected)
