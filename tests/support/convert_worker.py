# SPDX-License-Identifier: Apache-2.0
"""What ranks do for the tests of conversions: save under each framework, load, and step on."""

from pathlib import Path

import torch
from convert_model import (
    SAVED_AFTER,
    STEPS,
    Mixed,
    named_groups,
    run,
)
from fsdp_worker import start, whole
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zero_worker import base_optimizer, config, make_engine, take_step

from zero8 import Adam8bitBlockwise

MASTERS = {"bf16_master_weights_and_grads": True}


def engine_of(stage: int, groups: bool = True, universal: bool = False, **options):
    """Return an engine of a ZeRO stage."""
    model = Mixed()
    made = [
        {**{k: v for k, v in group.items() if k not in ("names", "params")}, "params": params}
        for group in named_groups(model)
        for params in [[p for _, p in group["params"]]]
    ]
    ds_config = config(stage, **{"offload": None, **options})
    ds_config["optimizer"]["params"] |= {"weight_decay": 0.0}
    ds_config["zero_optimization"]["sub_group_size"] = 9000
    if universal:
        ds_config["checkpoint"] = {"load_universal": True}
    return make_engine(ds_config, model, made if groups else None)


def save_zero(jobs: list[dict], folder: Path) -> None:
    """Train an engine of each job, the keywords of `engine_of` and a name, and save it."""
    for job in jobs:
        name = job.pop("name")
        engine = engine_of(**job)
        for step in range(SAVED_AFTER):
            take_step(engine, step)
        engine.save_checkpoint(folder / name)
        engine.destroy()


def load_zero(jobs: list[dict]) -> list[dict]:
    """Load converted checkpoints; return what this rank holds then, and after more steps."""
    found = []
    for job in jobs:
        source = job.pop("source")
        engine = engine_of(**job, universal=True)
        source = Path(source)
        path, _ = engine.load_checkpoint(str(source.parent), tag=source.name)
        assert path is not None
        base = base_optimizer(engine)
        for p in base.state:
            base.moments(p)  # encodes what has come in float32, as the next step does
        loaded = _held(base)
        for step in range(SAVED_AFTER, STEPS):
            take_step(engine, step)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in base.param_groups]
        found.append({"loaded": loaded, "stepped": _held(base), "groups": groups})
        engine.destroy()
    return found


def _held(optimizer) -> list[tuple]:
    """Return (name, first element, values and moments) of all that this rank holds."""
    held = []
    for p, state in optimizer.state.items():
        stores = [state[which].store for which in ("exp_avg", "exp_avg_sq")]
        for piece in stores[0].table.pieces:
            here = slice(piece.start, piece.start + piece.numel)
            values = [p.detach()[here].float().clone()]
            values += [store.read(piece.start, piece.numel) for store in stores]
            held.append((piece.name, piece.first, values))
    return held


def sharded(dtype: torch.dtype = torch.float32, **keywords):
    start()
    world = torch.distributed.get_world_size()
    model = fully_shard(Mixed(dtype), mesh=init_device_mesh("cpu", (world,)))
    return model, Adam8bitBlockwise(named_groups(model), **keywords)


def save_dcp(jobs: list[dict], folder: Path) -> None:
    """Train under FSDP2 and save, for each job: a name and the keywords of `sharded`."""
    for job in jobs:
        name = job.pop("name")
        model, optimizer = sharded(**job)
        run(model, optimizer, range(SAVED_AFTER))
        content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(content, checkpoint_id=folder / name)


def load_dcp(jobs: list[dict]) -> list[dict]:
    """Load converted checkpoints; return the whole of it then, and after more steps."""
    found = []
    for job in jobs:
        source = job.pop("source")
        model, optimizer = sharded(**job)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(content, checkpoint_id=source)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )
        loaded = _whole(model, optimizer)
        run(model, optimizer, range(SAVED_AFTER, STEPS))
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        stepped = _whole(model, optimizer)
        found.append({"loaded": loaded, "stepped": stepped, "groups": groups})
    return found


def _whole(model, optimizer) -> dict[str, dict]:
    optimizer.state_dict_format = "fp32"
    states = optimizer.state_dict()["state"]
    optimizer.state_dict_format = "8bit"
    params = [p for group in optimizer.param_groups for p in group["params"]]
    number = {p: n for n, p in enumerate(params)}
    found = {}
    for name, p in model.named_parameters():
        found[name] = {"values": whole(p.detach()).float()}
        for which in ("exp_avg", "exp_avg_sq"):
            if number[p] in states:
                found[name][which] = whole(states[number[p]][which])
        if "param_correction" in optimizer.state.get(p, {}):
            found[name]["correction"] = whole(optimizer.state[p]["param_correction"])
    return found
