# SPDX-License-Identifier: Apache-2.0
"""The comparison of maps: the paper's values, and the whole."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import low_bit
from benchmarks.fidelity.tasks import TextTask
from benchmarks.maps import __main__ as command
from benchmarks.maps.codes import GRAINS, NAMES, quantile
from examples.gpt.model import GPTConfig

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_quantile_map_is_the_midpoints_of_numpys_quantiles(signed):
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    x = x if signed else x.square() + 0.1
    edges = [np.quantile(x.double().numpy(), i / 257) for i in range(257)]
    expected = [(low + high) / 2 for low, high in zip(edges[:-1], edges[1:], strict=True)]
    assert quantile(x, signed).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_command_writes_tables_and_figures_with_the_smallest_errors_of_log(tmp_path, monkeypatch):
    task = TextTask(GPTConfig(context=64, width=64, layers=1, heads=2), window=16, batch_size=2)
    monkeypatch.setattr(command, "RUN", replace(command.RUN, task=task, steps=30))
    monkeypatch.setattr(command, "run_all", lambda jobs, workers: [job() for job in jobs])
    out = tmp_path / "maps.json"
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(out)])
    command.main()
    result = json.loads(out.read_text())
    for rows in (result["once"], result["carried"]):
        errors = {(row["map"], row["grain"]): row["rms_update_error"] for row in rows}
        assert errors.keys() >= {(name, grain) for name in NAMES for grain in GRAINS}
        assert min(errors, key=errors.get) == ("log", "block")
    for name in ("first_moment", "update_error", "pairs_block", "pairs_tensor"):
        assert out.with_name(f"maps_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_low_bit_command_writes_a_table_and_a_figure(tmp_path, monkeypatch):
    """To nearest, weights lose every update; 120 of half a step are 60."""
    out = tmp_path / "low_bit.json"
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(out)])
    low_bit.main()
    assert "| bfloat16 | nearest | 0.5 | 60 | -60 | 60 |" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
