# SPDX-License-Identifier: Apache-2.0
"""examples/trainer.py trains, saves, resumes and prints what the optimizer holds."""

import sys

import pytest
from places import ROOT
from processes import run

pytestmark = pytest.mark.integrations


def test_trainer_example_started_again_resumes_from_its_checkpoint(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "trainer.py"), "--out", str(tmp_path)]
    for steps, saved in (("10", {"checkpoint-10"}), ("20", {"checkpoint-10", "checkpoint-20"})):
        done = run([*command, "--steps", steps], OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "8-bit: " in done.stdout
        assert {path.name for path in tmp_path.glob("checkpoint-*")} == saved
    # Losses are logged every 10 steps: of the second run only that of the last 10.
    assert done.stdout.count("'loss'") == 1
