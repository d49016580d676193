# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of FSDP2 by torch.distributed.checkpoint alone, in every mode that it has."""

from pathlib import Path

import torch
from fsdp_worker import (
    LAYOUTS,
    OPTIONS,
    Weights,
    made,
    optimizer_of,
    results,
    run,
    sharded,
    whole,
)
from ranks import error_of
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import zero8

MODES = {
    "sharded": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "cpu_offload": {"cpu_offload": True},
    "full": {"full_state_dict": True, "cpu_offload": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
}


def content_of(model: nn.Module, optimizer, **options) -> dict:
    parts = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return dict(zip(("model", "optimizer"), parts, strict=True))


def save(model: nn.Module, optimizer, mode: str, folder: Path) -> None:
    """Write a checkpoint of a mode: files of all ranks, or one of rank 0 where it is full."""
    # What is broadcast when it is loaded is not when it is saved.
    options = {k: v for k, v in MODES[mode].items() if k != "broadcast_from_rank0"}
    content = content_of(model, optimizer, **options)
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
        content = content_of(model, optimizer, **MODES[mode])
        dcp.load(content, checkpoint_id=folder / mode)
    # One after the other: together, ranks that have nothing to broadcast would leave the model out.
    set_model_state_dict(model, content["model"], options=options)
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)


def save_all(layout: str, folder: Path, steps: int, more: int) -> tuple[dict, dict]:
    """Train, write a checkpoint of every mode, and train on."""
    model, optimizer = made(layout, steps)
    for mode in MODES:
        save(model, optimizer, mode, folder)
    saved = results(model, optimizer)
    run(model, optimizer, steps, steps + more)
    return saved, results(model, optimizer)


def resume(layout: str, folder: Path, mode: str, steps: int, more: int) -> tuple[dict, dict]:
    """Load a checkpoint into a model of other weights, and train on; returns as `save_all`."""
    model, optimizer = made(layout, lr=7.0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load(model, optimizer, mode, folder)
    loaded = results(model, optimizer)
    run(model, optimizer, steps, steps + more)
    return loaded, results(model, optimizer)


def adam_of(kind: str, model: nn.Module, **keywords) -> torch.optim.Optimizer:
    """Return torch's AdamW, or ours with a format of state dicts."""
    if kind == "AdamW":
        return torch.optim.AdamW(model.named_parameters(), **OPTIONS, **keywords)
    return optimizer_of(model, LAYOUTS["float32"], state_dict_format=kind, **keywords)


def moments(model: nn.Module, optimizer) -> dict[str, dict]:
    """Return by parameter step, and both moments in float32, whole."""
    is_ours = isinstance(optimizer, zero8.Adam8bitBlockwise)
    states = (zero8.export(optimizer) if is_ours else optimizer.state_dict())["state"]
    names = [name for name, _ in model.named_parameters()]
    keys = ("step", "exp_avg", "exp_avg_sq")
    return {name: {k: whole(states[n][k]) for k in keys} for n, name in enumerate(names)}


def carry(mode: str, first: str, second: str, folder: Path) -> tuple:
    """Train one optimizer, and load its checkpoint into another."""
    model = sharded(LAYOUTS["float32"])
    optimizer = adam_of(first, model)
    run(model, optimizer, 0, 3)
    save(model, optimizer, mode, folder)
    other_model = sharded(LAYOUTS["float32"])
    other = adam_of(second, other_model)
    run(other_model, other, 7, 8)
    before = moments(other_model, other)
    error = error_of(load, other_model, other, mode, folder)
    return moments(model, optimizer), before, moments(other_model, other), error


def assigned(folder: Path) -> tuple[list[dict], tuple[dict, dict]]:
    """Assign moments, as DTensors and as local tensors, and keep entries of other code."""
    pairs = [made("float32", 2) for _ in range(3)]
    (model, optimizer), (_, twin), (other_model, other) = pairs
    saved = zero8.export(twin)
    for number, p in enumerate(model.parameters()):
        values = torch.full_like(p.detach(), 0.5)
        saved["state"][number] |= {"exp_avg": values, "exp_avg_sq": values}
        given = values.to_local() if number % 2 else values
        optimizer.state[p].update(exp_avg=given.clone(), exp_avg_sq=given.clone())
    twin.load_state_dict(saved)
    for pair in pairs[:2]:
        run(*pair, 2, 3)
    for one, its in (pairs[0], pairs[2]):
        for p in one.parameters():
            its.state[p] |= {"slow": p.detach().clone() + (its is optimizer), "every": 5}
    save(model, optimizer, "full", folder)
    load(other_model, other, "full", folder)
    slow = {name: whole(other.state[p]["slow"]) for name, p in other_model.named_parameters()}
    wanted = {name: whole(p.detach()) + 1 for name, p in model.named_parameters()}
    assert all(other.state[p]["every"] == 5 for p in other_model.parameters())
    for its in (optimizer, other):
        for state in its.state.values():
            del state["slow"], state["every"]
    return [results(*pair) for pair in pairs[:2]], (slow, wanted)


def save_in_training(folder: Path) -> tuple[dict, dict, dict]:
    """Start an asynchronous checkpoint, train on while it is written, and load it elsewhere."""
    model, optimizer = made("offload", 3)
    expected = results(model, optimizer)
    content = content_of(model, optimizer)
    group = torch.distributed.new_group()  # of its own: two threads must not share one
    writing = dcp.async_save(content, checkpoint_id=folder / "sharded", process_group=group)
    run(model, optimizer, 3, 6)
    writing.result()
    torch.distributed.barrier()
    other, resumed = made("offload")
    load(other, resumed, "sharded", folder)
    return expected, results(model, optimizer), results(other, resumed)


def save_sharded(folder: Path) -> dict:
    """Train under FSDP2, write a checkpoint and return `results`."""
    model, optimizer = made("float32", 3)
    save(model, optimizer, "sharded", folder)
    return results(model, optimizer)


def read(model: nn.Module, optimizer, path: Path) -> None:
    """Load a checkpoint, a folder of DCP's or a file."""
    content = content_of(model, optimizer)
    if path.is_dir():
        dcp.load(content, checkpoint_id=path)
    else:
        content = torch.load(path, weights_only=True)
    parts = {"model_state_dict": content["model"], "optim_state_dict": content["optimizer"]}
    set_state_dict(model, optimizer, **parts)


def load_plain(path: Path) -> dict:
    """Load a checkpoint in this process; return `results`."""
    model = Weights()
    optimizer = optimizer_of(model, LAYOUTS["float32"])
    read(model, optimizer, path)
    return results(model, optimizer)
