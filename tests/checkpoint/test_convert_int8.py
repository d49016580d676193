# SPDX-License-Identifier: Apache-2.0
"""Conversions of folders in which weights of torchao are saved as the tensors inside."""

import pytest
import torch
from convert_cases import converted, refusal, same
from int8_folders import CODES, NAME, SCALES, save, save_cut, trained

from zero8.spec import int8_rows


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


@pytest.mark.parametrize(
    "cut",
    [(CODES, SCALES, "moments"), (CODES, "moments")],
    ids=["all", "all but scales"],
)
def test_convert_of_int8_weights_that_ranks_cut_joins_them(cut, standing_ranks, tmp_path):
    standing_ranks(2).run(save_cut, folder=tmp_path / "in", cut=list(cut))
    assert converted(tmp_path / "in", tmp_path / "out", "plain")["notes"] == []
    params, _ = trained()
    model = torch.load(tmp_path / "out", weights_only=True)["model"]
    assert model.keys() == params.keys()
    assert torch.equal(model[NAME], decoded(params))


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


def test_convert_of_int8_weights_whose_tensors_do_not_fit_is_refused(tmp_path):
    _, content = trained()
    del content["model"][SCALES]
    error = refusal(save(tmp_path / "in", content), tmp_path / "out")
    assert "scale None, expected int8 of 2 dimensions and one scale per row" in error
