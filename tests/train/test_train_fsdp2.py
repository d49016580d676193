# SPDX-License-Identifier: Apache-2.0
"""The demonstration under FSDP2: the training that DeepSpeed does, without DeepSpeed."""

from functools import partial

import pytest
from places import FOLDERS
from ranks import free_port
from train_worker import DEEPSPEED, FSDP2, row

from zero8.files import tags
from zero8.files.manifest import MANIFEST

RANKS = 2
EIGHT_BIT = "Adam8bitBlockwise"
# The first two have learning rate 0, so three change the weights.
STEPS = 5


@pytest.mark.parametrize("engine", [DEEPSPEED, FSDP2])
def test_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(
    engine, standing_ranks, tmp_path
):
    """The newest checkpoint was cut short, so the run is resumed before the last step."""
    train = partial(standing_ranks(RANKS).run, row, engine=engine, optimizer=EIGHT_BIT, steps=STEPS)
    whole, _ = train(out=str(tmp_path), save_every=STEPS - 1)
    (newest,) = tmp_path.glob(f"{EIGHT_BIT}.checkpoint/*step{STEPS}")
    (newest / MANIFEST).unlink()
    tags.begin(newest, tags.next_sequence(newest.parent))
    resumed, _ = train(out=str(tmp_path), resume=True)
    assert (resumed["first_step"], resumed["codec"]) == (STEPS - 1, "log")
    assert resumed["train_curve"] == whole["train_curve"][STEPS - 1 :]
    assert resumed["val_loss"] == whole["val_loss"]
    # What is done already is not done again.
    assert train(out=str(tmp_path), resume=True) == [None, None]


WITHOUT_DEEPSPEED = """
import sys
sys.modules["deepspeed"] = None
from train_worker import row
row("fsdp2", "Adam8bitBlockwise", steps=2, out=sys.argv[1], codec="fp8")
"""


@pytest.mark.slow
def test_fsdp2_job_where_deepspeed_cannot_be_imported_trains(forks, tmp_path):
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code = f"import sys; sys.path[:0] = {FOLDERS!r}\n{WITHOUT_DEEPSPEED}"
    done = forks.run(code, str(tmp_path), **world, **address, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
