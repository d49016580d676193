# SPDX-License-Identifier: Apache-2.0
"""The demonstration on GPUs, with its optimizer states in host memory and without offload."""

import json
import sys

import pytest
from places import ROOT
from processes import run

pytestmark = pytest.mark.gpu
# Between the validation losses of the two optimizers; other seeds are 0.6 % apart.
LARGEST_GAP = 0.02


@pytest.mark.parametrize("config", ["zero2_offload", "zero2_bf16"])
def test_training_on_gpus_ends_at_a_loss_near_that_of_fp32(config, tmp_path):
    settings = {"STEPS": "200", "CONFIG": f"configs/{config}.json", "OUT": str(tmp_path)}
    done = run(["bash", str(ROOT / "launch" / "local.sh")], PYTHON=sys.executable, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    fp32, quantized = (one["val_loss"] for one in summary["runs"])
    assert summary["device"] == "cuda"
    assert quantized == pytest.approx(fp32, rel=LARGEST_GAP)
