# SPDX-License-Identifier: Apache-2.0
"""Periodic gradients in the fidelity measurement."""

import json

import pytest
import torch

from benchmarks.fidelity import resonance as harness
from benchmarks.fidelity.resonance import MEMBERS, Member, RoundedSecondMoment
from benchmarks.fidelity.schemes import Shadow, zero8_scheme
from benchmarks.fidelity.training import Layout
from zero8.spec.codec import DEFAULT_CODEC

TWO = (Member(3, 64), Member(3, 1000), Member(5, 65))


def test_members_are_the_smallest_parameters_with_8_bit_states():
    for member in MEMBERS:
        assert 4096 <= member.numel < 4096 + member.width
        assert member.grid.row_length == member.width


def test_gradients_repeat_and_have_a_spike_in_every_other_row():
    member = Member(3, 64)
    period = member.gradients()
    assert torch.equal(period, member.gradients())
    spike = period[:, member.is_spike]
    assert torch.allclose(spike[0], harness.CONTRAST * spike[1])
    assert torch.equal(spike[1], spike[2])
    flat = harness.Gradients((member, Member(5, 64)))
    assert torch.equal(flat.at(7)[: member.numel], period[1])
    assert not torch.equal(flat.at(7), flat.at(10))
    assert torch.equal(flat.at(7), flat.at(22))


def test_dithered_second_moment_is_the_optimizers():
    """To fp32 rounding, of which the harness takes less care, so a few codes are a step away."""
    member, beta2 = Member(3, 255), 0.99
    layout = Layout((member.name,), ((member.grid.num_rows, member.width),))
    shadow = Shadow(zero8_scheme(DEFAULT_CODEC), layout, (0.9, beta2))
    moment = RoundedSecondMoment((member,), beta2, harness.NUMBERS["dithered"])
    gradients = harness.Gradients((member,))
    for step in range(1, 8):
        moment.step(gradients.at(step), step)
        shadow.update(gradients.at(step))
    ratio = shadow.second_moments() / moment.stored()
    assert ((ratio - 1).abs() > 1e-5).double().mean() < 1e-3


def test_simulation_with_exact_storage_has_no_error(monkeypatch):
    class Exact(RoundedSecondMoment):
        def _store(self, v, step):
            self._v = v.clone()

        def step(self, grad, step):
            self._v.mul_(self._beta2).addcmul_(grad, grad, value=1 - self._beta2)
            return self._v

        def stored(self):
            return self._v

    monkeypatch.setattr(harness, "RoundedSecondMoment", Exact)
    errors = harness.simulate(TWO, 0.95, 20, lambda: None)
    everything = torch.ones(sum(member.numel for member in TWO), dtype=torch.bool)
    for found in errors.values():
        result = found.result(everything)
        assert result["rms_update_error"] < 1e-6
        assert result["sqrt_v_bias"] == pytest.approx(1, abs=1e-6)


def test_resonance_of_a_few_members_gives_a_row_per_period_and_pattern():
    ticks = []
    rows = harness.resonance(TWO, 0.9, 30, lambda: ticks.append(1))
    assert len(ticks) == 30
    assert [(row["period"], row["pattern"]) for row in rows] == [
        (3, "spike"),
        (3, "random"),
        (5, "spike"),
        (5, "random"),
    ]
    for row in rows:
        assert 0 < row["dithered"]["rms_update_error"] < 0.1
        assert 0 < row["hashed"]["rms_update_error"] < 0.1
        errors = [row[kind]["rms_update_error"] for kind in ("dithered", "hashed")]
        assert row["ratio"] == pytest.approx(errors[0] / errors[1])
        assert row["worst_width"] in ((64, 1000) if row["period"] == 3 else (65,))
        assert row["worst_width_ratio"] >= 0.999 * row["ratio"]
    json.dumps(rows, allow_nan=False)


def test_second_moment_of_periodic_gradients_is_unbiased_to_one_percent():
    """The worst case were runs of thresholds to go one way only: then it is 1.5 %."""
    for row in harness.resonance((Member(5, 256),), 0.99, 400, lambda: None):
        assert abs(row["dithered"]["sqrt_v_bias"] - 1) <= 0.01
