# SPDX-License-Identifier: Apache-2.0
"""What ranks do for the tests of conversions: save under each framework, load, and step on."""

from pathlib import Path

import torch
from convert_model import SAVED_AFTER, STEPS, Mixed, named_groups, results, unnamed_groups
from fsdp_checkpoints import content_of, read
from fsdp_worker import run, start
from ranks import error_of
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zero_worker import base_optimizer, config, held, make_engine, take_step

from zero8 import Adam8bitBlockwise


def settings(stage, offload=None, universal=True, **options):
    """Return a config of DeepSpeed that loads universal checkpoints or ordinary ones."""
    made = config(stage, offload, **options)
    return made | ({"checkpoint": {"load_universal": True}} if universal else {})


def visit(jobs: list[dict]) -> list[dict]:
    """Do several jobs of `visit_one`, one after the other."""
    return [visit_one(**job) for job in jobs]


def visit_one(
    ds_config, source=None, tag=None, steps=(), target=None, grouped=True, model=Mixed, read=None
) -> dict:
    """Load a checkpoint into a new engine, step, save; return what is read on the way."""
    engine, read = engine_of(ds_config, grouped, model), read or encoded
    result = {}
    if source is not None:
        path, _ = engine.load_checkpoint(str(source), tag=tag)
        assert path is not None
        result["loaded"] = read(engine)
    for step in steps:
        take_step(engine, step)
    result["stepped"] = read(engine)
    if target is not None:
        engine.save_checkpoint(str(target), tag="saved")
    engine.destroy()
    return result


def engine_of(ds_config: dict, grouped: bool = True, model: type = Mixed):
    """Return a new engine over a model, in the groups of a `Mixed` or all in one."""
    made = model()
    return make_engine(ds_config, made, unnamed_groups(made) if grouped else None)


def encoded(engine) -> dict:
    """Return what `held` does, float32 moments of ours encoded, and the options of the groups."""
    base = base_optimizer(engine)
    for p in base.state if hasattr(base, "moments") else ():
        base.moments(p)  # encodes what has come in float32, as the next step does
    options = [{k: v for k, v in g.items() if k != "params"} for g in base.param_groups]
    return {**held(engine), "options": options}


def error_of_load(ds_config: dict, source: str, grouped: bool = True):
    """Return the error of a load into a new engine."""
    return error_of(engine_of(ds_config, grouped).load_checkpoint, source)


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
        run(model, optimizer, 0, SAVED_AFTER)
        content = content_of(model, optimizer)
        dcp.save(content, checkpoint_id=folder / name)


def load_dcp(jobs: list[dict]) -> list[dict]:
    """Load converted checkpoints; return the whole of it then, and after more steps."""
    found = []
    for job in jobs:
        model, optimizer = sharded()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        read(model, optimizer, job["source"])
        loaded = results(model, optimizer)
        run(model, optimizer, SAVED_AFTER, STEPS)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        stepped = results(model, optimizer)
        found.append({"loaded": loaded, "stepped": stepped, "groups": groups})
    return found
