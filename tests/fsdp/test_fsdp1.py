# SPDX-License-Identifier: Apache-2.0
"""FSDP1: its flat parameters have float32 moments, and its checkpoints are those of AdamW."""

import pytest
import torch
from fsdp1_worker import resume
from torch import nn

from zero8 import Adam8bitBlockwise
from zero8.state.tell import tell_once

# Where AdamW goes on from its checkpoint.  With use_orig_params torch 2.13 gathers other first
# moments than those it is given, of any optimizer.
EXACT = [(False, "FSDP"), (False, "full"), (False, "sharded"), (True, "sharded")]
AdamW = torch.optim.AdamW


@pytest.mark.slow
@pytest.mark.parametrize(("use_orig_params", "api"), EXACT)
def test_fsdp1_checkpoint_goes_on_with_the_same_losses(use_orig_params, api, standing_ranks):
    arguments = {"use_orig_params": use_orig_params, "api": api}
    for expected, got, report in standing_ranks(2).run(resume, **arguments):
        assert got == expected
        assert "1-dimensional, flattened by FSDP1" in report


@pytest.mark.slow
@pytest.mark.parametrize("api", ["FSDP", "full"])
def test_fsdp1_checkpoint_that_torch_damages_is_noticed_when_it_no_longer_is(api, standing_ranks):
    arguments = {"use_orig_params": True, "api": api, "first": AdamW, "second": AdamW}
    for expected, got, _ in standing_ranks(2).run(resume, **arguments):
        assert got != expected, "add it to EXACT"


@pytest.mark.parametrize(
    "classes", [(AdamW, Adam8bitBlockwise), (Adam8bitBlockwise, AdamW)], ids=["from", "to"]
)
def test_fsdp1_checkpoints_are_adamws_too(classes, standing_ranks):
    """The two differ by roundings: in 3 steps of lr 0.01 losses by less than 1e-5 of themselves."""
    arguments = dict(zip(("first", "second"), classes, strict=True))
    ranks = standing_ranks(2)
    for expected, got, _ in ranks.run(resume, use_orig_params=False, api="full", **arguments):
        assert got == pytest.approx(expected, rel=1e-5)


def test_fsdp1_flat_parameters_are_warned_of_and_fsdp2_is_named(caplog):
    p = nn.Parameter(torch.ones(8192))
    p._fsdp_flattened = True
    tell_once.cache_clear()
    Adam8bitBlockwise([p])
    assert "8 bytes per element; FSDP2" in caplog.text
