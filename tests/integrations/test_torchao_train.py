# SPDX-License-Identifier: Apache-2.0
"""The demonstration with torchao's INT8 weights in its linear layers, under FSDP2."""

import pytest
from train_worker import FSDP2, row

from examples.gpt.__main__ import INT8
from zero8 import cli
from zero8.files import tags
from zero8.files.manifest import MANIFEST

pytestmark = pytest.mark.integrations

RANKS = 2
# The first two have learning rate 0, so three change the weights.
STEPS = 5
OPTIMIZER = "Adam8bitBlockwise"


def test_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(standing_ranks, tmp_path):
    """From its checkpoints without the newest, which was cut short."""
    job = {"engine": FSDP2, "weights": INT8, "steps": STEPS, "optimizer": OPTIMIZER}
    job["out"], checkpoints = str(tmp_path), tmp_path / f"{OPTIMIZER}.checkpoint"
    expected = standing_ranks(RANKS).run(row, **job, save_every=STEPS - 1)[0]
    newest = checkpoints / f"step{STEPS}"
    (newest / MANIFEST).unlink()
    tags.begin(newest, tags.next_sequence(checkpoints))
    resumed = standing_ranks(RANKS).run(row, **job, resume=True)[0]
    assert resumed["first_step"] == STEPS - 1
    assert resumed["train_curve"] == expected["train_curve"][STEPS - 1 :]
    assert resumed["val_loss"] == expected["val_loss"]
    assert cli.main(["checkpoint", "verify", str(checkpoints)]) == 0
