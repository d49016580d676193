# SPDX-License-Identifier: Apache-2.0
"""The demonstration under FSDP2: the training that DeepSpeed does, without DeepSpeed."""

import itertools
import shutil

import pytest
from places import FOLDERS
from ranks import free_port
from train_worker import DEEPSPEED, FSDP2, row

from zero8.files import tags
from zero8.files.manifest import MANIFEST

RANKS = 2
BASELINE, EIGHT_BIT = "AdamW", "Adam8bitBlockwise"
CHECKPOINT = f"{EIGHT_BIT}.checkpoint"
# The first two have learning rate 0, so three change the weights.
STEPS = 5

# Of losses after the same steps in another order of float32 operations, which makes 1.6e-4 in three
# steps, and of 8-bit blocks that the boundary of ZeRO between two ranks cuts, which adds 2e-5.  The
# steps change the loss by hundreds of times as much.
TOLERANCE = 3e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def rows(standing_ranks, checkpoints):
    """Return rank 0's measurements by engine and optimizer."""
    runs = itertools.product((DEEPSPEED, FSDP2), (BASELINE, EIGHT_BIT))
    return {
        (engine, optimizer): standing_ranks(RANKS).run(
            row,
            engine=engine,
            optimizer=optimizer,
            steps=STEPS,
            out=str(checkpoints / f"{engine}-{optimizer}"),
            save_every=STEPS - 1,
        )[0]
        for engine, optimizer in runs
    }


@pytest.fixture
def stopped_before_the_last_step(rows, checkpoints, tmp_path):
    """Return a function: a copy of a run's checkpoints without the newest, which was cut short."""

    def copied(engine, optimizer):
        folder = tmp_path / "copy"
        shutil.copytree(checkpoints / f"{engine}-{optimizer}", folder)
        (newest,) = folder.glob(f"{CHECKPOINT}/*step{STEPS}")
        (newest / MANIFEST).unlink()
        tags.begin(newest, tags.next_sequence(newest.parent))
        return folder

    return copied


@pytest.mark.parametrize("engine", [DEEPSPEED, FSDP2])
def test_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(
    standing_ranks, rows, stopped_before_the_last_step, engine
):
    folder = stopped_before_the_last_step(engine, EIGHT_BIT)
    resume = dict(engine=engine, optimizer=EIGHT_BIT, steps=STEPS, out=str(folder))
    resumed = standing_ranks(RANKS).run(row, **resume, resume=True)[0]
    whole = rows[engine, EIGHT_BIT]
    assert (resumed["first_step"], resumed["codec"]) == (STEPS - 1, "log")
    assert resumed["train_curve"] == whole["train_curve"][STEPS - 1 :]
    assert resumed["val_loss"] == whole["val_loss"]
    # What is done already is not done again.
    assert standing_ranks(RANKS).run(row, **resume, resume=True) == [None, None]


@pytest.mark.parametrize("engine", [pytest.param(DEEPSPEED, marks=pytest.mark.slow), FSDP2])
def test_run_that_is_resumed_on_another_number_of_ranks_goes_on(
    standing_ranks, stopped_before_the_last_step, engine
):
    folder = stopped_before_the_last_step(engine, EIGHT_BIT)
    resume = dict(engine=engine, optimizer=EIGHT_BIT, steps=STEPS, out=str(folder))
    resumed = standing_ranks(1).run(row, **resume, resume=True)[0]
    assert resumed["first_step"] == STEPS - 1
    assert (resumed["ranks"], len(resumed["train_curve"])) == (1, 1)
    # And back: what one rank has saved is the newest now.
    longer = standing_ranks(RANKS).run(row, **{**resume, "steps": STEPS + 1}, resume=True)[0]
    assert (longer["first_step"], longer["ranks"]) == (STEPS, RANKS)


@pytest.mark.parametrize("optimizer", [BASELINE, EIGHT_BIT])
def test_fsdp2_first_losses_are_those_under_deepspeed(rows, optimizer):
    ours, theirs = rows[FSDP2, optimizer], rows[DEEPSPEED, optimizer]
    assert ours["train_curve"][:3] == pytest.approx(theirs["train_curve"][:3], abs=1e-5)
    assert ours["train_curve"] == pytest.approx(theirs["train_curve"], abs=TOLERANCE)
    assert ours["val_loss"] == pytest.approx(theirs["val_loss"], abs=TOLERANCE)
    assert theirs["train_curve"][0] - theirs["train_curve"][-1] > 0.1


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
