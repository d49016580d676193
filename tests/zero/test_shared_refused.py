# SPDX-License-Identifier: Apache-2.0
"""`Adam8bitShared` says that it does not support sharding yet, before a step changes anything."""

import pytest
from zero_worker import Bag, config, make_engine, take_step

import zero8


def refusals():
    """Return the errors of engines with the optimizer by name, and with one of the user's."""
    found = []
    for stage in (0, 2, 3):
        by_name = config(stage=stage, offload=None)
        by_name["optimizer"]["type"] = "Adam8bitShared"
        with pytest.raises(ValueError) as caught:
            make_engine(by_name, Bag())
        found.append(str(caught.value))
    for stage in (2, 3):
        given, bag = config(stage=stage, offload=None), Bag()
        del given["optimizer"]
        own = zero8.Adam8bitShared(list(bag.named_parameters()))
        with pytest.raises(ValueError) as caught:
            take_step(make_engine(given, bag, optimizer=own), 0)
        found.append(str(caught.value))
    return found


def test_shared_under_deepspeed_is_refused(standing_ranks):
    for message in standing_ranks(1).run(refusals)[0]:
        assert message.startswith("Adam8bitShared: got ") and "Adam8bitBlockwise" in message
