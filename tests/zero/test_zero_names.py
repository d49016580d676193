# SPDX-License-Identifier: Apache-2.0
"""Parameters keep their names in every DeepSpeed engine: policy, dither and reports need them."""

from types import SimpleNamespace

import pytest
from deepspeed.utils.debug import debug_clear_module_and_param_names
from zero_worker import Bag, base_optimizer, config, make_engine, take_step

import zero8
from zero8.deepspeed.constructing import constructing_engine, noted

FLOAT32 = ["embed", "conv"]
EXPECTED_BITS = {name: 32 for name in Bag.SHAPES if name != "frozen"}
EXPECTED_BITS |= {"wide": 8, "long": 8, "thin": 8, "unused": 8}
WITHOUT_ZERO = {
    "zero0": config(stage=0, offload=None),
    "zero0 bf16": config(stage=0, offload=None, dtype={}),
    "zero0 fp16": config(stage=0, offload=None) | {"fp16": {"enabled": True}},
}


def while_another_engine_is_collected(params):
    """Construct the optimizer; before, DeepSpeed forgets its map of names."""
    debug_clear_module_and_param_names()
    return zero8.Adam8bitBlockwise(params, fp32_params=FLOAT32)


def collect_names():
    """Return what memory reports say, after a step, by engine."""
    ds_config = config(offload=None)
    del ds_config["optimizer"]
    engines = {
        "collected": make_engine(ds_config, Bag(), optimizer=while_another_engine_is_collected)
    }
    for name, ds_config in WITHOUT_ZERO.items():
        ds_config["optimizer"]["params"]["fp32_params"] = FLOAT32
        engines[name] = make_engine(ds_config, Bag())
    reports = {}
    for name, engine in engines.items():
        take_step(engine, 0)
        reports[name] = base_optimizer(engine).memory_report().to_dicts()
    return reports


@pytest.fixture(scope="module")
def reports(standing_ranks):
    return standing_ranks(1).run(collect_names)[0]


@pytest.mark.parametrize("name", ["collected", *WITHOUT_ZERO])
def test_names_are_known_in_every_engine(reports, name):
    """The collection of an engine empties DeepSpeed's map, and happens on one rank only."""
    assert {row["name"]: row["bits"] for row in reports[name]} == EXPECTED_BITS


def test_constructing_engine_is_the_innermost_and_none_after_an_error():
    outer, inner = SimpleNamespace(param_names={}), SimpleNamespace(param_names={1: "one"})
    assert constructing_engine() == (None, {})
    with noted(outer):
        with pytest.raises(ValueError), noted(inner):
            assert constructing_engine() == (inner, {1: "one"})
            raise ValueError
        assert constructing_engine() == (outer, {})
    assert constructing_engine() == (None, {})
