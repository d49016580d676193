# SPDX-License-Identifier: Apache-2.0
"""Tags that any writer fills: complete when it has ended on all ranks, and not before."""

from pathlib import Path

import pytest
import torch
from damages import flip
from fsdp_worker import start
from ranks import error_of
from torch import distributed

from zero8.files import tagged, tags


def save(folder, name, failing=(), keep=0) -> Path:
    """Write a file of each rank into a tag; some ranks fail instead."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    with tagged.saving(folder, name, keep) as tag:
        if rank in failing:
            raise RuntimeError("no space for it")
        torch.save({"rank": rank, "name": name}, tag / f"rank{rank}.pt")
    return tag


def save_and_find(folder) -> dict:
    """Save one tag whole and one that rank 1 fails at; return what ranks are told and find."""
    start()
    save(folder, "step1")
    error = error_of(save, folder, "step2", (1,))
    found = tagged.newest(folder)
    left = tags.tag_at(Path(folder, "step2")).state, tags.read_latest(folder)
    rank = distributed.get_rank()
    if rank == 0:
        flip(found / "rank1.pt")
    distributed.barrier()
    damaged = error_of(tagged.newest, folder)
    return {"error": error, "found": found.name, "left": left, "damaged": damaged}


@pytest.mark.parametrize("names", [[], ["__0_0.distcp"], ["model/__0_0.distcp", ".metadata"]])
def test_saving_of_what_is_not_written_yet_is_refused_and_the_tag_before_stays(tmp_path, names):
    """As of dcp.async_save, which nobody has waited for."""
    tag = save(tmp_path, "step1")
    assert [file.path for file in tags.verify(tag).files] == ["rank0.pt"]
    with (
        pytest.raises(ValueError, match=r"saving .*step2: got no .* dcp.async_save"),
        tagged.saving(tmp_path, "step2", keep=1) as tag,
    ):
        for name in names:
            (tag / name).parent.mkdir(exist_ok=True)
            (tag / name).write_bytes(b"part")
    assert tags.read_latest(tmp_path) == "step1" and tagged.newest(tmp_path).name == "step1"


def test_ranks_save_find_and_fail_together(standing_ranks, tmp_path):
    found = standing_ranks(2).run(save_and_find, folder=str(tmp_path))
    assert [rank["found"] for rank in found] == ["step1", "step1"]
    assert found[1]["error"] == ("RuntimeError", "no space for it")
    kind, message = found[0]["error"]
    assert kind == "OSError" and "rank 1: RuntimeError: no space for it" in message
    for rank in found:
        assert rank["left"] == (tags.INCOMPLETE, "step1")
        kind, message = rank["damaged"]
        assert kind == "ValueError" and "rank1.pt" in message
