# SPDX-License-Identifier: Apache-2.0
"""The demonstration with torchao's INT8 weights in its linear layers, under FSDP2."""

import shutil

import pytest
import torch
from ranks import ranks_of_sizes
from torch import nn
from train_worker import FSDP2, SMALL, loaded_int8_weights, row

from examples.gpt.__main__ import INT8
from examples.gpt.model import GPT
from zero8 import Adam8bitBlockwise, cli
from zero8.files import tags
from zero8.files.manifest import MANIFEST
from zero8.spec import int8_rows

pytestmark = pytest.mark.integrations

RANKS = 2
# The first two have learning rate 0, so three change the weights.
STEPS = 5
OPTIMIZER = "Adam8bitBlockwise"


def int8_job(out, **changes):
    job = {"engine": FSDP2, "weights": INT8, "steps": STEPS, "optimizer": OPTIMIZER}
    return job | {"out": str(out)} | changes


def checkpoint_of(out):
    return out / f"{OPTIMIZER}.checkpoint"


@pytest.fixture(scope="module")
def standing_ranks(tmp_path_factory):
    """Ranks of this file alone: ZeRO-3 replaces F.linear for good, and torchao notes what it is."""
    with ranks_of_sizes(tmp_path_factory.mktemp) as of:
        yield of


@pytest.fixture(scope="module")
def trained(standing_ranks, tmp_path_factory):
    """The folder of a run, and rank 0's measurements."""
    out = tmp_path_factory.mktemp("checkpoints") / "out"
    return out, standing_ranks(RANKS).run(row, **int8_job(out, save_every=STEPS - 1))[0]


def test_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(
    standing_ranks, trained, tmp_path
):
    """From its checkpoints without the newest, which was cut short."""
    (out, expected), copied = trained, tmp_path / "copy"
    shutil.copytree(out, copied)
    newest = checkpoint_of(copied) / f"step{STEPS}"
    (newest / MANIFEST).unlink()
    tags.begin(newest, tags.next_sequence(newest.parent))
    resumed = standing_ranks(RANKS).run(row, **int8_job(copied, resume=True))[0]
    assert resumed["first_step"] == STEPS - 1
    assert resumed["train_curve"] == expected["train_curve"][STEPS - 1 :]
    assert resumed["val_loss"] == expected["val_loss"]
    assert cli.main(["checkpoint", "verify", str(checkpoint_of(copied))]) == 0


def test_checkpoint_that_is_converted_loads_with_decoded_weights(standing_ranks, trained, tmp_path):
    folder, out = str(checkpoint_of(trained[0])), str(tmp_path / "out")
    saved = standing_ranks(RANKS).run(loaded_int8_weights, checkpoint=folder)[0]
    assert cli.main(["checkpoint", "convert", folder, out, "--to", "plain"]) == 0
    content = torch.load(out, weights_only=True)
    model = GPT(SMALL)
    model.load_state_dict(content["model"])
    optimizer = Adam8bitBlockwise(model.named_parameters())
    optimizer.load_state_dict(content["optimizer"])
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    for name in (f"{layer}.weight" for layer in linear):
        weights = int8_rows.decoded(saved[f"{name}.int_data"], saved[f"{name}.scale"])
        assert torch.equal(content["model"][name], weights), name
