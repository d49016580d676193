# SPDX-License-Identifier: Apache-2.0
"""What the optimizer asks of frameworks, none of which it knows."""

import pytest
import torch

import zero8
from zero8 import frameworks, known_frameworks
from zero8.frameworks import Framework
from zero8.state.tell import tell_once


class Recording(Framework):
    """A framework that calls every parameter p, and remembers what was asked."""

    def __init__(self):
        self.asked = []

    def fit(self, base_class, optimizer_class):
        assert issubclass(optimizer_class, base_class)
        self.asked.append(optimizer_class.__name__)

    def global_shape(self, p):
        return (77, *p.shape)

    def claim(self, optimizer, params, use):
        self.asked.append(use)


def test_optimizer_without_registered_frameworks_raises(monkeypatch):
    monkeypatch.setattr(frameworks, "_registered", [])
    with pytest.raises(RuntimeError, match="could not register the frameworks"):
        zero8.Adam8bitBlockwise([torch.nn.Parameter(torch.zeros(4))])


def test_optimizer_asks_a_framework_that_was_registered(monkeypatch):
    recording = Recording()
    monkeypatch.setattr(frameworks, "_registered", [*frameworks._registered, recording])
    p = torch.nn.Parameter(torch.zeros(4, 1024))
    optimizer = zero8.Adam8bitBlockwise([p])
    name, use = recording.asked
    assert name == "Adam8bitBlockwise" and not use.is_met
    assert [info.shape for info in optimizer._states.infos().values()] == [(77, 4, 1024)]


def test_use_after_a_step_is_met_and_outlives_the_optimizer(monkeypatch):
    recording = Recording()
    monkeypatch.setattr(frameworks, "_registered", [recording])
    monkeypatch.setattr(Recording, "global_shape", lambda self, p: None)
    p = torch.nn.Parameter(torch.zeros(4, 1024))
    optimizer = zero8.Adam8bitBlockwise([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    del optimizer
    assert recording.asked[1].is_met


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_engine_that_asks_for_l2_is_told_once_that_it_gets_it(monkeypatch, caplog, adam_w_mode):
    monkeypatch.setattr(frameworks, "constructing_engine", lambda: (object(), {}))
    tell_once.cache_clear()
    for _ in range(2):
        zero8.Adam8bitBlockwise([torch.nn.Parameter(torch.zeros(4))], adam_w_mode=adam_w_mode)
        zero8.SGD8bitBlockwise([torch.nn.Parameter(torch.zeros(4))], momentum=0.9)
    told = [line for line in caplog.messages if "adam_w_mode is false" in line]
    assert len(told) == (not adam_w_mode)


def test_known_frameworks_registered_twice_are_registered_once():
    before = list(frameworks._registered)
    known_frameworks.register()
    assert frameworks._registered == before and len(before) == 2
