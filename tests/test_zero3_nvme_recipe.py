# SPDX-License-Identifier: Apache-2.0
"""configs/zero3_nvme.json, as `make train` runs it."""

import json
import sys
from pathlib import Path

import processes
import pytest

from zero8.train.build import build_aio, build_ops

# DeepSpeed's aio is built by a first run; a build that is interrupted leaves a lock behind.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

ROOT = Path(__file__).parents[1]


def test_zero3_nvme_recipe_trains_both_optimizers(tmp_path):
    build_ops()
    build_aio()
    config = json.loads((ROOT / "configs" / "zero3_nvme.json").read_text())
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path / "swap")
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = processes.run(
        ["bash", str(ROOT / "launch" / "local.sh")],
        seconds=900,
        STEPS="3",
        RANKS="2",
        CONFIG=str(tmp_path / "config.json"),
        DATA=str(ROOT / "zero8"),
        OUT=str(tmp_path / "out"),
        PYTHON=sys.executable,
        DS_ACCELERATOR="cpu",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    fp32, quantized = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert (fp32["optimizer"], quantized["optimizer"]) == ("AdamW", "Adam8bitBlockwise")
    assert fp32["state_bytes_per_param"] == 8
    assert 2 < quantized["state_bytes_per_param"] < 2.1
    assert fp32["state_numel"] == quantized["state_numel"] == quantized["parameters"]
    for rank in range(2):
        assert list((tmp_path / "swap").rglob(f"rank{rank}/zero8-*"))
