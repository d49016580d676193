# SPDX-License-Identifier: Apache-2.0
"""INT8 weights, for which a tensor of torch's that is made of two others stands here."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from examples.gpt.engine_fsdp2 import separated, shard
from examples.gpt.run import memory


@pytest.fixture
def model():
    """A layer with a weight of 6 rows made of two tensors."""
    layer = nn.Linear(4, 6)
    layer.weight = nn.Parameter(TwoTensor(torch.zeros(6, 4), torch.ones(6, 4)))
    return layer


@pytest.fixture
def ranks(monkeypatch):
    """Return a function that makes this process one of so many."""
    return lambda number: monkeypatch.setattr(torch.distributed, "get_world_size", lambda: number)


def test_one_rank_on_the_cpu_has_the_whole_model(model, ranks):
    ranks(1)
    assert shard(model, torch.device("cpu"), True, "none") is model


@pytest.mark.parametrize(
    ("number", "device", "precision"), [(4, "cpu", "none"), (1, "cuda", "none"), (1, "cpu", "bf16")]
)
def test_ranks_that_cannot_share_the_rows_are_refused(model, ranks, number, device, precision):
    ranks(number)
    message = f"got {number} rank.s. for INT8 weights of .6. rows, expected a number above 1"
    with pytest.raises(ValueError, match=message):
        shard(model, torch.device(device), True, precision)


def test_separated_weight_is_two_tensors_that_share_its_memory(model):
    parts = separated(model.state_dict())
    assert list(parts) == ["weight.a", "weight.b", "bias"]
    parts["weight.b"].fill_(3)
    assert torch.equal(model.weight.b, torch.full((6, 4), 3.0))


def test_bytes_of_a_weight_are_those_of_all_it_is_made_of(model, monkeypatch):
    monkeypatch.setattr("examples.gpt.run.sum_over_ranks", lambda values, _: values)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    assert memory(optimizer, torch.device("cpu"))["weight_bytes_per_param"] is None
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.zeros(1)
    found = memory(optimizer, torch.device("cpu"))
    assert found["weight_bytes_per_param"] == (2 * 24 + 6) * 4 / 30
    assert found["state_bytes"] == 8
