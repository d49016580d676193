# SPDX-License-Identifier: Apache-2.0
"""What ranks run of test_tagged.py."""

from pathlib import Path

import torch
from fsdp_worker import start
from ranks import error_of
from torch import distributed

from zero8.files import tagged


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
    rank = distributed.get_rank()
    if rank == 0:
        path = found / "rank1.pt"
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    distributed.barrier()
    return {"error": error, "found": found.name, "damaged": error_of(tagged.newest, folder)}
