# SPDX-License-Identifier: Apache-2.0
"""`Adam8bitShared` says that it does not support sharded parameters yet."""

import pytest
from small_optimizers import run
from torch import nn
from torch.distributed.fsdp import fully_shard

import zero8


def refusal() -> str:
    """Return the error of an optimizer for a model of FSDP2."""
    model = fully_shard(nn.Linear(64, 128))
    with pytest.raises(ValueError) as caught:
        zero8.Adam8bitShared(model.named_parameters())
    return str(caught.value)


def loading(saved: dict) -> str:
    """Return the error of a load of a whole state into an optimizer of sharded parameters."""
    model = fully_shard(nn.Linear(64, 96, bias=False))
    optimizer = zero8.Adam8bitBlockwise(model.named_parameters())
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(saved)
    assert not optimizer.state
    return str(caught.value)


def test_shared_state_is_refused_by_sharded_parameters_whose_ranks_would_cut_its_tiles(
    standing_ranks,
):
    model = nn.Linear(64, 96, bias=False)
    optimizer = zero8.Adam8bitShared(model.named_parameters())
    run(optimizer, list(model.parameters()), 1)
    for message in standing_ranks(2).run(loading, saved=optimizer.state_dict()):
        assert message.startswith("state of weight: got one of Adam8bitShared for a parameter that")


def test_shared_of_sharded_parameters_is_refused(standing_ranks):
    expected = "Adam8bitShared: got a parameter that is sharded, expected whole ones: it does not "
    for message in standing_ranks(2).run(refusal):
        assert message.startswith(expected)
