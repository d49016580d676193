# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import torch

from examples.gpt import measure
from examples.gpt.measure import StepTimer


def test_step_timer_counts_all_that_a_step_asks_a_gpu_for_and_nothing_from_before(monkeypatch):
    """With 20 ms of work queued before a step, and a step that queues 10 ms and returns."""
    clock = SimpleNamespace(now_s=0.0, queued_s=0.02)

    def synchronize():
        clock.now_s, clock.queued_s = clock.now_s + clock.queued_s, 0.0

    class Queueing(torch.optim.SGD):
        def step(self, closure=None):
            clock.queued_s += 0.01

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    optimizer = Queueing([torch.nn.Parameter(torch.zeros(1))])
    timer = StepTimer(optimizer)
    optimizer.step()
    assert abs(timer.take_ms() - 10) < 1e-6
    assert timer.take_ms() == 0
