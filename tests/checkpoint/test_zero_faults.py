# SPDX-License-Identifier: Apache-2.0
"""Kills at every write of a save, full disks, two jobs: what was complete stays, and is loaded."""

import os
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from fault_worker import RANKS, run
from full_disk import file_size_limit
from nests import assert_same
from ranks import error_of, on_ranks
from zero_worker import config, held, make_engine, train

from zero8.files import atomic, tags
from zero8.files.tags import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RANK = int(os.environ.get("RANK", 0))
JOB_TIMEOUT_S = 60
LAYOUTS = {"zero2 offload": config(stage=2), "zero3 offload, bf16": config(stage=3, dtype={})}
MOST_STEPS = 30


def killed_job(folder, ds_config, undisturbed, kill):
    """Run a job that is killed; check what it resumed and what it left; return its notes."""
    checkpoints = folder / "checkpoints"
    complete = [tag.name for tag in tags.complete_tags(checkpoints)]
    latest = tags.read_latest(checkpoints) or (complete[-1] if complete else "global_step0")
    ended = run(folder, JOB_TIMEOUT_S, ds_config=ds_config, kill=kill)
    logs = "".join((folder / f"rank{rank}.log").read_text()[-2000:] for rank in range(RANKS))
    assert None not in ended["statuses"], (kill, ended, logs)
    for rank, notes in enumerate(ended["notes"]):
        first = notes["first"]
        assert first == int(latest.removeprefix("global_step")), kill
        # The bits of a run that was never disturbed: weights, codes and scales, and the next loss.
        assert notes["held"] == undisturbed[rank]["held"][first : first + 2], kill
        assert notes["losses"] == undisturbed[rank]["losses"][first : first + 1], kill
    # Whatever looks complete is.
    for tag in tags.complete_tags(checkpoints):
        verify(checkpoints / tag.name)
    named = tags.read_latest(checkpoints)
    if named is not None:
        assert tags.tag_at(checkpoints / named).state == tags.COMPLETE, kill
    return ended


@pytest.mark.parametrize(("name", "every"), [("zero2 offload", 1), ("zero3 offload, bf16", 5)])
def test_run_killed_at_any_write_of_a_save_resumes_with_the_bits_of_one_never_disturbed(
    tmp_path, name, every
):
    """Each job resumes what the killed one before it left, takes a step, and saves."""
    ds_config = LAYOUTS[name] | {"zero8": {"keep_checkpoints": 3}}
    whole = run(tmp_path / "undisturbed", 4 * JOB_TIMEOUT_S, ds_config=ds_config, steps=MOST_STEPS)
    assert whole["statuses"] == [0, 0]
    folder = tmp_path / "disturbed"
    (folder / "checkpoints").mkdir(parents=True)
    kills, first = 0, []
    for rank in range(RANKS):
        for number in range(0, 10_000, every):
            kill = (rank, number)
            ended = killed_job(folder, ds_config, whole["notes"], kill)
            first.append(ended["notes"][0]["first"])
            if ended["statuses"] == [0, 0]:  # it has fewer writes
                break
            assert ended["statuses"][rank] == -9
            # The other finds its peer gone, or had nothing left to do.
            assert ended["statuses"][1 - rank] in (3, 0)
            kills += 1
    assert kills > 30 // every
    assert first == sorted(first) and first[-1] > 1  # the run has come on
    assert first[-1] < MOST_STEPS


# --- A disk that is full -------------------------------------------------------------------------


def full_for(name):
    """Have the disk be full for the atomic writes of files with this name."""
    original = atomic.os.replace

    def replace(source, target):
        if Path(target).name == name:
            raise OSError(28, "No space left on device")
        return original(source, target)

    return patch.object(atomic.os, "replace", replace)


# The rank whose disk is full, the file that has no room, and how.
CASES = {
    "optimizer states": (1, "pp_rank_1_mp_rank_00_optim_states.pt", lambda: file_size_limit(20000)),
    "nothing fits": (0, "zero8", lambda: file_size_limit(10)),
    "manifest": (0, "zero8_manifest.json", lambda: full_for("zero8_manifest.json")),
    "name": (0, "latest", lambda: full_for("latest")),
}


@on_ranks(2)
def test_save_onto_a_full_disk_is_an_error_on_both_ranks_and_hurts_no_other_tag(tmp_path):
    """The disk is full for one rank and file after another; then there is room."""
    engine = make_engine(config())
    train(engine, 1)
    engine.save_checkpoint(tmp_path, tag="good")
    saved = held(engine)
    train(engine, 1, first=1)
    for name, (rank, file, limit) in CASES.items():
        with limit() if rank == RANK else nullcontext():
            error = error_of(engine.save_checkpoint, tmp_path, tag="full")
        torch.distributed.barrier()
        assert error and error[0] == "OSError" and file in error[1], (name, error)
        if name.endswith("states"):
            assert f"rank {rank}: " in error[1] and "bytes are free there" in error[1], error
        assert tags.read_latest(tmp_path) == "good"
        torch.distributed.barrier()
    engine.load_checkpoint(tmp_path)
    assert_same(held(engine), saved)
    engine.save_checkpoint(tmp_path, tag="full")
    torch.distributed.barrier()
    verify(tmp_path / "full")
    assert tags.read_latest(tmp_path) == "full"
