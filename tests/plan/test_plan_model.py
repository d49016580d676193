# SPDX-License-Identifier: Apache-2.0
"""Models of a size alone, and of a list of shapes; those of transformers are in integrations."""

import json

import pytest

from zero8.plan.model import Model


def model_of(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    return Model.of_file(path)


def test_shapes_are_taken_as_they_are(tmp_path):
    model = model_of(tmp_path, json.dumps({"a": [20, 300], "b": [7]}))
    assert model.params == (("a", (20, 300)), ("b", (7,)))
    assert (model.numel, model.largest_numel) == (6007, 6000)


@pytest.mark.parametrize(("text", "numel"), [("8B", 8e9), ("350m", 350e6), ("1.5T", 1.5e12)])
def test_size_has_as_many_parameters_up_to_a_row(text, numel):
    model = Model.of_size(text)
    assert numel - 4096 < model.numel <= numel
    assert model.largest_numel == 4096 * 4096


@pytest.mark.parametrize("text", ["", "8 billions", "-3B", "100"])
def test_size_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="expected a size such as 350M, 8B"):
        Model.of_size(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 8}', "a config.json with a model_type"),
        ('{"a": [3, -1]}', "expected names and shapes"),
        ("[1]", "a JSON object that is not empty"),
        ("{}", "a JSON object that is not empty"),
        ("{", "not JSON"),
    ],
)
def test_file_that_is_not_understood_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        model_of(tmp_path, text)
