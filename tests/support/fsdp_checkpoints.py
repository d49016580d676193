# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of FSDP2 by torch.distributed.checkpoint alone, in every mode that it has."""

from pathlib import Path

import torch
from fsdp_worker import LAYOUTS, optimizer_of, results, run, sharded, start
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

MODES = {
    "sharded": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "cpu_offload": {"cpu_offload": True},
    "full": {"full_state_dict": True, "cpu_offload": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
}


def save(model: nn.Module, optimizer, mode: str, folder: Path) -> None:
    """Write a checkpoint of a mode: files of all ranks, or one of rank 0 where it is full."""
    # What is broadcast when it is loaded is not when it is saved.
    options = {k: v for k, v in MODES[mode].items() if k != "broadcast_from_rank0"}
    parts = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    content = dict(zip(("model", "optimizer"), parts, strict=True))
    if not options.get("full_state_dict"):
        dcp.save(content, checkpoint_id=folder / mode)
    elif torch.distributed.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save(content, folder / f"{mode}.pt")
    torch.distributed.barrier()


def load(model: nn.Module, optimizer, mode: str, folder: Path) -> None:
    """Read a checkpoint of a mode."""
    options = StateDictOptions(**MODES[mode])
    if options.full_state_dict:
        content = {"model": {}, "optimizer": {}}
        if not options.broadcast_from_rank0 or torch.distributed.get_rank() == 0:
            content = torch.load(folder / f"{mode}.pt", weights_only=True)
    else:
        parts = get_state_dict(model, optimizer, options=options)
        content = dict(zip(("model", "optimizer"), parts, strict=True))
        dcp.load(content, checkpoint_id=folder / mode)
    # One after the other: together, ranks that have nothing to broadcast would leave the model out.
    set_model_state_dict(model, content["model"], options=options)
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)


def save_all(layout: str, folder: Path, steps: int, more: int) -> tuple[dict, dict]:
    """Train, write a checkpoint of every mode, and train on.

    Returns:
        `results` at the checkpoints, and at the end.
    """
    start()
    model = sharded(LAYOUTS[layout])
    optimizer = optimizer_of(model, LAYOUTS[layout])
    run(model, optimizer, 0, steps)
    for mode in MODES:
        save(model, optimizer, mode, folder)
    saved = results(model, optimizer)
    run(model, optimizer, steps, steps + more)
    return saved, results(model, optimizer)


def resume(layout: str, folder: Path, mode: str, steps: int, more: int) -> tuple[dict, dict]:
    """Load a checkpoint into a model of other weights, and train on; returns as `save_all`."""
    start()
    model = sharded(LAYOUTS[layout])
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = optimizer_of(model, LAYOUTS[layout], lr=7.0)
    load(model, optimizer, mode, folder)
    loaded = results(model, optimizer)
    run(model, optimizer, steps, steps + more)
    return loaded, results(model, optimizer)
