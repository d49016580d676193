# SPDX-License-Identifier: Apache-2.0
"""INT8 weights, for which a tensor of torch's that is made of two others stands here."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from examples.gpt.config_fsdp2 import FSDP2Settings
from examples.gpt.engine_fsdp2 import whole
from examples.gpt.int8_weights import check_sharding, separated
from examples.gpt.measure import weight_bytes_per_param


@pytest.fixture
def model():
    """A layer with a weight of 6 rows made of two tensors."""
    layer = nn.Linear(4, 6)
    layer.weight = nn.Parameter(TwoTensor(torch.zeros(6, 4), torch.ones(6, 4)))
    return layer


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_that_divide_the_rows_are_accepted(model, ranks):
    check_sharding(model, ranks)


def test_ranks_that_do_not_divide_the_rows_are_refused_with_the_weight(model):
    message = "got 4 ranks for the 6 rows of the INT8 weight weight, expected a number that divides"
    with pytest.raises(ValueError, match=message):
        check_sharding(model, 4)


def test_float32_weights_are_accepted_on_any_number_of_ranks():
    check_sharding(nn.Linear(4, 6), 4)


def test_one_rank_on_the_cpu_has_the_whole_model(model):
    assert whole(model, torch.device("cpu"), FSDP2Settings(True, "none")) is model


@pytest.mark.parametrize(("device", "precision"), [("cuda", "none"), ("cpu", "bf16")])
def test_one_rank_that_needs_fsdp2_is_refused(model, device, precision):
    message = f"got one rank on {device} with mixed_precision = '{precision}' for INT8 weights"
    with pytest.raises(ValueError, match=message):
        whole(model, torch.device(device), FSDP2Settings(True, precision))


def test_separated_weight_is_two_tensors_that_share_its_memory(model):
    parts = separated(model.state_dict())
    assert list(parts) == ["weight.a", "weight.b", "bias"]
    parts["weight.b"].fill_(3)
    assert torch.equal(model.weight.b, torch.full((6, 4), 3.0))


def test_bytes_of_a_weight_are_those_of_all_it_is_made_of(model, monkeypatch):
    monkeypatch.setattr("examples.gpt.measure.sum_over_ranks", lambda values, _: values)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    assert weight_bytes_per_param(optimizer, torch.device("cpu")) is None
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.zeros(1)
    assert weight_bytes_per_param(optimizer, torch.device("cpu")) == (2 * 24 + 6) * 4 / 30
