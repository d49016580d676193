# SPDX-License-Identifier: Apache-2.0
"""What examples.gpt.run does on each of several ranks, one after the other in this process."""

from types import SimpleNamespace

import pytest
import torch

from examples.gpt import run


class Counting(torch.nn.Module):
    """Takes the mean of its windows for their loss."""

    calls = 0

    def forward(self, windows):
        self.calls += 1
        return windows.double().mean()


@pytest.mark.parametrize("world_size", [1, 2, 4, 9])
def test_validate_calls_the_module_equally_often_on_all_ranks_and_takes_no_window_twice(
    monkeypatch, world_size
):
    """Nine windows, at most two at a time; ranks that do not divide nine leave some out."""
    windows = torch.arange(9.0)[:, None]
    sums, modules = [], []
    monkeypatch.setattr(run, "mean_over_ranks", lambda total, count, _: sums.append((total, count)))
    monkeypatch.setattr(run.dist, "get_world_size", lambda: world_size)
    for rank in range(world_size):
        monkeypatch.setattr(run.dist, "get_rank", lambda rank=rank: rank)
        modules.append(Counting())
        engine = SimpleNamespace(module=modules[-1], micro_batch_size=2, device="cpu")
        run.validate(engine, windows)
    assert len({module.calls for module in modules}) == 1
    totals, counts = zip(*sums, strict=True)
    assert set(counts) == {9 // world_size}
    assert sum(totals) == windows[: sum(counts)].sum()
