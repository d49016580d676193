# SPDX-License-Identifier: Apache-2.0
"""The same checkpoint with FSDP2 and in one process without torch.distributed."""

from pathlib import Path

import torch
from fsdp_checkpoints import save
from fsdp_worker import LAYOUTS, Weights, optimizer_of, results, run, sharded, start
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save_sharded(folder: Path) -> dict:
    """Train under FSDP2, write a checkpoint and return `results`."""
    start()
    model = sharded(LAYOUTS["float32"])
    optimizer = optimizer_of(model, LAYOUTS["float32"])
    run(model, optimizer, 0, 3)
    save(model, optimizer, "sharded", folder)
    return results(model, optimizer)


def load_plain(path: Path) -> dict:
    """Load a checkpoint, a folder of DCP's or a file, in this process; return `results`."""
    model = Weights()
    optimizer = optimizer_of(model, LAYOUTS["float32"])
    parts = get_state_dict(model, optimizer)
    content = dict(zip(("model", "optimizer"), parts, strict=True))
    if path.is_dir():
        dcp.load(content, checkpoint_id=path)
    else:
        content = torch.load(path, weights_only=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    return results(model, optimizer)
