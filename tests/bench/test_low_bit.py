# SPDX-License-Identifier: Apache-2.0
"""Small updates of weights of few bits."""

import json
import sys

import pytest
import torch

from benchmarks import low_bit as command
from benchmarks.low_bit import CODES, THRESHOLDS, distance, rounded

STEPS = 120
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_codes_over_all_thresholds_have_the_value_as_their_mean():
    weights = torch.full((THRESHOLDS,), 40.3 * CODES["INT8"])
    found = rounded("INT8", weights, torch.arange(THRESHOLDS)) / CODES["INT8"]
    assert set(found.tolist()) == {40, 41}
    assert found.mean().item() == pytest.approx(40.3, abs=2**-16)


@pytest.mark.parametrize("number_format", CODES)
@pytest.mark.parametrize("share", [1 / 2, 1 / 8, 1 / 64])
def test_nearest_loses_every_update_and_the_dither_follows_the_right_path(number_format, share):
    lost, dithered, independent = (
        distance(number_format, share, rounding, STEPS)
        for rounding in ("nearest", "dither", "independent")
    )
    assert lost["RMS distance"] == -lost["mean distance"] == STEPS * share
    assert abs(dithered["mean distance"]) < 0.01 and dithered["RMS distance"] < 1.5
    assert dithered["RMS distance"] < independent["RMS distance"]


def test_command_writes_a_table_and_a_figure(tmp_path, monkeypatch):
    out = tmp_path / "low_bit.json"
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(out)])
    command.main()
    assert len(json.loads(out.read_text())["distances"]) == 18
    assert "| bfloat16 | nearest | 0.5 | 60 | -60 | 60 |" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
