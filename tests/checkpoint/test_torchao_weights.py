# SPDX-License-Identifier: Apache-2.0
"""Weights of torchao 0.18 in a file that tests/golden/write_torchao_weights.py made."""

import pytest
import torch
from convert_cases import converted, same
from places import GOLDEN

from zero8.checkpoint.read.inert import Inert
from zero8.checkpoint.read.safe_load import load
from zero8.checkpoint.read.torchao_weights import values_of
from zero8.state.weights import INSIDE, INT8_ROWS

PATH = GOLDEN / "torchao_weights.pt"
DTYPES = {
    "int8.weight": torch.float32,
    "int8_bfloat16.weight": torch.float32,  # only the scales are in bfloat16
    "int8_matmuls.weight": torch.float32,
    "bitnet.weight": torch.bfloat16,
    "float8.weight": torch.float32,
}
CODES, SCALES = torch.ones(3, 5, dtype=torch.int8), torch.ones(3)


def test_convert_of_torchao_weights_has_their_values_and_states(tmp_path):
    result = converted(PATH, tmp_path / "out", "plain")
    assert result["has_weights"] and result["notes"] == []
    theirs, found = load(PATH), torch.load(tmp_path / "out", weights_only=True)
    assert all(isinstance(saved, Inert) for saved in theirs["model"].values())
    assert {name: values.dtype for name, values in found["model"].items()} == DTYPES
    for number, (name, values) in enumerate(found["model"].items()):
        assert torch.equal(values, theirs["values"][name]) and values.any(), name
        state = theirs["optimizer"]["state"][number]
        assert same(found["optimizer"]["state"][number], state, state)


def saved_weight(kind: str, parts: object) -> Inert:
    made = Inert(f"torchao.somewhere.{kind}", ())
    made.state = parts
    return made


@pytest.mark.parametrize(
    ("parts", "got"),
    [
        ({"scale": SCALES}, "int_data None"),
        ({"int_data": CODES.float(), "scale": SCALES}, "(3, 5), torch.float32"),
        ({"int_data": CODES[0], "scale": SCALES}, "int_data of shape (5,)"),
        ({"int_data": CODES, "scale": torch.ones(4)}, "scale of shape (4,)"),
        ({"int_data": CODES, "scale": SCALES.half()}, "(3,), torch.float16"),
        ({"int_data": CODES, "scale": Inert("torch.Tensor", ())}, "a value of type Inert"),
    ],
)
def test_reader_of_int8_weights_whose_tensors_do_not_fit_raises_value_error(parts, got):
    with pytest.raises(ValueError, match="'w': got int_data") as caught:
        values_of("w", saved_weight(INT8_ROWS, parts))
    assert got in str(caught.value)
    assert "expected int8 of 2 dimensions and one scale per row" in str(caught.value)


@pytest.mark.parametrize("kind", [INT8_ROWS, *INSIDE])
@pytest.mark.parametrize("parts", [None, {}, {"_data": None, "_tensor": None}])
def test_reader_of_weights_without_their_tensors_raises_value_error(kind, parts):
    with pytest.raises(ValueError, match="'w': got a weight of torchao's without its tensors"):
        values_of("w", saved_weight(kind, parts))
