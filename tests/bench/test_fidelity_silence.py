# SPDX-License-Identifier: Apache-2.0
"""Gradients that end, in the fidelity measurement."""

import pytest
import torch

from benchmarks.fidelity.silence import LAYOUT, LOUD_STEPS, gradients, silence


def test_gradients_after_the_loud_steps_are_zero_in_every_other_column():
    before, after = (
        gradients(step).view(LAYOUT.shapes[0]) for step in (LOUD_STEPS - 1, LOUD_STEPS)
    )
    assert before.ne(0).all()
    assert not after[:, ::2].any() and after[:, 1::2].ne(0).all()
    assert torch.equal(gradients(7), gradients(7))


def test_silence_in_fp32_ends_after_the_sum_of_the_decaying_updates():
    ticks = []
    rows = {row["scheme"]: row for row in silence(0.95, 60, lambda: ticks.append(1))}
    assert len(ticks) == LOUD_STEPS + 60
    assert rows["torch_fp32"]["last_abs_u"] < 0.01
    assert rows["torch_fp32"]["way_over_fp32"] == 1.0
    # bfloat16 moments have an exponent of their own each: they decay as float32 ones do.
    assert rows["deepspeed_bf16"]["way_over_fp32"] == pytest.approx(1.0, abs=0.02)
