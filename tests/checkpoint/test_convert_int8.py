# SPDX-License-Identifier: Apache-2.0
"""Conversions of folders in which weights of torchao are saved as the tensors inside."""

from pathlib import Path

import pytest
import torch
from convert_cases import converted, same
from int8_weights import int8_param
from small_optimizers import param, run
from torch import nn
from torch.distributed import checkpoint as dcp

from zero8 import Adam8bitBlockwise
from zero8.spec import int8_rows

NAME = "layer.weight"
SHAPE = (40, 300)
CODES, SCALES = f"{NAME}.int_data", f"{NAME}.scale"


def trained(dtype: torch.dtype = torch.float32) -> tuple[dict[str, nn.Parameter], dict]:
    """Return an INT8 weight and a bias after two steps, and the content of a checkpoint of them."""
    weight = int8_param(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), dtype)
    params = {NAME: weight, "layer.bias": param(40)}
    optimizer = Adam8bitBlockwise(list(params.items()), lr=1e-2, weight_decay=0.1)
    run(optimizer, params.values(), 2)
    saved = optimizer.state_dict()
    states = {name: saved["state"][number] for number, name in enumerate(params)}
    groups = [{**saved["param_groups"][0], "params": list(params)}]
    model = {CODES: weight.int_data, SCALES: weight.scale, "layer.bias": params["layer.bias"]}
    return params, {"model": model, "optimizer": {"state": states, "param_groups": groups}}


def save(folder: Path, content: dict) -> Path:
    """Write a folder by one process."""
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def decoded(params):
    return int8_rows.decoded(params[NAME].int_data, params[NAME].scale)


@pytest.mark.parametrize("dtype", int8_rows.SCALE_DTYPES)
def test_convert_of_int8_weights_to_plain_decodes_them_and_keeps_their_states(dtype, tmp_path):
    params, content = trained(dtype)
    result = converted(save(tmp_path / "in", content), tmp_path / "out", "plain")
    assert result["has_weights"] and result["notes"] == []
    found = torch.load(tmp_path / "out", weights_only=True)
    assert found["model"].keys() == params.keys()
    assert found["model"][NAME].dtype == torch.float32
    assert torch.equal(found["model"][NAME], decoded(params))
    state = content["optimizer"]["state"][NAME]
    assert same(found["optimizer"]["state"][0], state, state)


@pytest.mark.parametrize("part", ["_data", "_tensor"])
@pytest.mark.parametrize("to", ["plain", "dcp"])
def test_convert_of_weights_saved_as_the_tensor_inside_gives_them_their_name(part, to, tmp_path):
    params, content = trained()
    del content["model"][CODES], content["model"][SCALES]
    content["model"][f"{NAME}.{part}"] = decoded(params)
    content["model"][f"frozen.{part}"] = torch.ones(3)  # of no parameter with states
    result = converted(save(tmp_path / "in", content), tmp_path / "out", to)
    assert result["has_weights"] and result["notes"] == []
    if to == "dcp":
        converted(tmp_path / "out", tmp_path / "plain", "plain")
    model = torch.load(tmp_path / ("plain" if to == "dcp" else "out"), weights_only=True)["model"]
    assert model.keys() == {*params, f"frozen.{part}"}
    assert torch.equal(model[NAME], decoded(params))


def test_convert_keeps_tensors_of_these_names_that_are_of_no_parameter_with_states(tmp_path):
    _, content = trained()
    others = {"other.int_data": torch.ones(3, 2, dtype=torch.int8), "other.scale": torch.ones(3)}
    content["model"] |= others | {"norm.scale": torch.ones(5)}
    converted(save(tmp_path / "in", content), tmp_path / "out", "plain")
    model = torch.load(tmp_path / "out", weights_only=True)["model"]
    assert model.keys() == {NAME, "layer.bias", "norm.scale", *others}
    assert all(torch.equal(model[key], value) for key, value in others.items())
