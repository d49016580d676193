# SPDX-License-Identifier: Apache-2.0
"""`Adam8bitShared` says that it does not support sharded parameters yet."""

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

import zero8


def refusal() -> str:
    """Return the error of an optimizer for a model of FSDP2."""
    model = fully_shard(nn.Linear(64, 128))
    with pytest.raises(ValueError) as caught:
        zero8.Adam8bitShared(model.named_parameters())
    return str(caught.value)


def test_shared_of_sharded_parameters_is_refused(standing_ranks):
    expected = "Adam8bitShared: got a parameter that is sharded, expected whole ones: it does not "
    for message in standing_ranks(2).run(refusal):
        assert message.startswith(expected)
