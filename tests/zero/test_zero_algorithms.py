# SPDX-License-Identifier: Apache-2.0
"""Other algorithms than Adam under ZeRO: saved, loaded in fresh engines, gone on with."""

import pytest
from nests import difference
from zero_worker import base_optimizer, config, make_engine, through_and_resumed, train

import zero8

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
STEPS = 3


def steps(engine, is_on):
    return train(engine, STEPS, first=STEPS * is_on)


def run_through_and_resumed(folder):
    """Return by layout what `through_and_resumed` does, and what states have."""
    result = {}
    for name, ds_config in LAYOUTS.items():
        made = []

        def make(ds_config=ds_config, made=made):
            made.append(make_engine(ds_config | CLIPPED))
            return made[-1]

        runs = through_and_resumed(make, steps, folder, name)
        entries = [sorted(state) for state in base_optimizer(made[-1]).state.values() if state]
        result[name] = *runs, entries
    return result


def algorithm_of(name):
    section = LAYOUTS[name]["optimizer"]
    return getattr(zero8, section["type"]).algorithm


def memory_of(name):
    return {one.name for one in algorithm_of(name).memory}


@pytest.fixture(scope="module")
def ranks(standing_ranks, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("algorithms"))
    return standing_ranks(2).run(run_through_and_resumed, folder=folder, timeout_s=300)


@pytest.mark.parametrize("name", LAYOUTS)
def test_zero_algorithm_resumes_with_the_same_bits(ranks, name):
    expected = set(algorithm_of(name).moment_names)
    for through, resumed, all_entries in (rank[name] for rank in ranks):
        assert difference(through, resumed) == ""
        assert through["losses"][-1] < through["losses"][0]
        assert all_entries
        for entries in all_entries:
            found = {entry.removesuffix("_q8").removesuffix("_scale") for entry in entries}
            assert found - {"step", "format"} - memory_of(name) == expected
