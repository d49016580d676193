# SPDX-License-Identifier: Apache-2.0
"""The numbers for monitors, against memory reports, states that are made by hand, and a clock."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from small_optimizers import param, run, small_model

import zero8
from zero8.checkpoint.read.statistics import counts_of, saturated
from zero8.integrations import health as module
from zero8.integrations.health import Reports, health
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS

pytestmark = pytest.mark.usefixtures("one_torch_thread")
every_codec = pytest.mark.parametrize("codec", CODECS)


def stepped(model=None, **settings):
    """Return an optimizer after two steps, by default over two 8-bit matrices and two biases."""
    params = list((model or small_model()).parameters())[::-1]  # the first has no codes
    optimizer = zero8.Adam8bitBlockwise(params, lr=1e-3, **settings)
    run(optimizer, params, 2)
    return optimizer


def test_health_bytes_and_share_are_those_of_the_memory_report():
    optimizer = stepped()
    rows, values = optimizer.memory_report().rows, health(optimizer)
    assert values["zero8/state_bytes"] == sum(row.state_bytes for row in rows)
    in_8bit = sum(row.numel for row in rows if row.bits == 8)
    assert in_8bit == 300 * 64 + 64 * 100
    assert values["zero8/share_8bit"] == in_8bit / (in_8bit + 64 + 100)
    assert all(type(value) is float for value in values.values())


@every_codec
def test_health_saturated_codes_are_those_that_inspect_counts(codec):
    optimizer = stepped(codec=codec)
    values, pairs = health(optimizer), optimizer.all_moments().values()
    for which, stores in zip(ADAM.moment_names, zip(*pairs, strict=True), strict=True):
        counts = sum(counts_of(store) for store in stores)
        for end, share in saturated(CODECS[codec].code_of(ADAM.moment(which)), counts).items():
            assert values[f"zero8/{which}_{end}"] == share


def test_health_of_muon_counts_codes_of_its_moment_and_of_adams():
    matrix, embed = param(64, 100), param(300, 64)
    optimizer = zero8.Muon8bitBlockwise([("w", matrix), ("embed", embed)])
    run(optimizer, [matrix, embed], 1)
    names = {name.rpartition("_at_")[0] for name in health(optimizer) if "_at_" in name}
    assert names == {"zero8/momentum_buffer", "zero8/exp_avg", "zero8/exp_avg_sq"}


def test_health_clipped_updates_are_those_that_the_next_step_clips():
    """At a first step m^2 is K v, and `dynamic` has few codes for the smallest v of a block."""
    p = param(32, 256)
    optimizer = zero8.Adam8bitBlockwise([p], codec="dynamic", eps=1e-30)
    p.grad = torch.logspace(-4, 0, p.numel())[torch.randperm(p.numel())].view(p.shape)
    optimizer.step()
    m, v = (store.read(0, p.numel()) for store in optimizer.moments(p))
    history = optimizer.state[p]["history"]
    s = ADAM.scalars(1, (history,), {**ADAM.options, "eps": 1e-30}, True)
    ratio = m / (v.sqrt() * s.inverse_sqrt_correction2 + s.eps)
    expected = (ratio > module.MARGIN * s.max_ratio).double().mean().item()
    assert 0.01 < expected < 0.5
    assert health(optimizer)["zero8/clipped"] == pytest.approx(expected, abs=2 / p.numel())


def test_health_of_one_of_several_ranks_says_whose_it_is(monkeypatch):
    monkeypatch.setattr(module.ranks, "num_ranks", lambda: 2)
    monkeypatch.setattr(module.ranks, "rank", lambda: 1)
    reports = Reports(stepped(), 1)
    names = reports.after(1)
    assert "zero8/rank1/state_bytes" in names and "zero8/rank1/step_ms" in names
    assert all(name.startswith("zero8/rank1/") for name in names)


def test_reports_come_at_every_nth_step_with_the_mean_time_of_a_step_since_the_last(monkeypatch):
    """Each look at the clock takes a second."""
    ticks, optimizer = itertools.count(), stepped()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    reports, params = Reports(optimizer, 3), optimizer.param_groups[0]["params"]
    found = []
    for step in range(1, 7):
        for _ in range(2 if step <= 3 else 1):  # twice: as ZeRO for two groups
            run(optimizer, params, 1)
        found.append(reports.after(step))
    assert [bool(values) for values in found] == [False, False, True] * 2
    assert [found[step]["zero8/step_ms"] for step in (2, 5)] == [2000, 1000]
    assert found[5].keys() == health(optimizer).keys() | {"zero8/step_ms"}


def test_reports_refuse_other_optimizers_and_a_distance_that_is_none():
    with pytest.raises(ValueError, match="got AdamW, expected an optimizer of zero8"):
        Reports(torch.optim.AdamW([param(4, 4)]), 1)
    for every in (0, -1, 1.5, True, "50"):
        with pytest.raises(ValueError, match="expected a positive integer"):
            Reports(zero8.Adam8bitBlockwise([param(64, 100)]), every)
