# SPDX-License-Identifier: Apache-2.0
"""What the optimizer tells DeepSpeed, and asks it, where there is no engine or one makes it."""

import pytest
import torch

import zero8
from zero8.deepspeed import claims
from zero8.state.tell import tell_once


def test_use_after_a_step_is_met_and_outlives_the_optimizer(monkeypatch):
    uses = []
    monkeypatch.setattr(claims, "claim", lambda params, made: uses.append(made))
    p = torch.nn.Parameter(torch.zeros(4, 1024))
    optimizer = zero8.Adam8bitBlockwise([p])
    p.grad = torch.ones_like(p)
    assert not uses[0].is_met
    optimizer.step()
    del optimizer
    assert uses[0].is_met


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_engine_that_asks_for_l2_is_told_once_that_it_gets_it(monkeypatch, caplog, adam_w_mode):
    monkeypatch.setattr("zero8.optimizer.blockwise.constructing_engine", lambda: (object(), {}))
    tell_once.cache_clear()
    for _ in range(2):
        zero8.Adam8bitBlockwise([torch.nn.Parameter(torch.zeros(4))], adam_w_mode=adam_w_mode)
        zero8.SGD8bitBlockwise([torch.nn.Parameter(torch.zeros(4))], momentum=0.9)
    told = [line for line in caplog.messages if "adam_w_mode is false" in line]
    assert len(told) == (not adam_w_mode)
