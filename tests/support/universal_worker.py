# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the tests of universal checkpoints run: load, look, step, save."""

from pathlib import Path

import torch
from zero_worker import MOMENTS, Bag, base_optimizer, config, held, make_engine, take_step


class Parts(Bag):
    """Parameters of every kind of place in a universal checkpoint; gradients as those of `Bag`."""

    SHAPES = {
        "embed": (67, 96),  # rows of one block of 96
        "wide": (20, 300),  # 256 + 44
        "conv": (6, 10, 9, 13),  # rows of 117: two dimensions kept
        "lora_b": (701, 8),  # blocks of 32 rows; the last has 29
        "small": (37, 41),  # fewer than 4096 elements: float32 moments
        "bias": (131,),  # one dimension: float32 moments
        "single": (1,),  # with a group of its own, on one rank alone
        "unused": (60, 70),  # never gets a gradient
        "frozen": (50, 90),  # does not want one
    }


GROUPS = (
    {"names": ("embed", "lora_b", "small"), "lr": 2e-2, "weight_decay": 0.0, "betas": [0.8, 0.99]},
    {"names": ("wide", "conv", "bias", "unused", "frozen"), "weight_decay": 0.25},
    {"names": ("single",), "lr": 1e-3},
)


def engine_of(ds_config: dict, groups: bool = False):
    """Return a new engine over `Parts`, in one group or in three."""
    bag = Parts()
    made = [
        {
            **{key: value for key, value in group.items() if key != "names"},
            "params": [getattr(bag, name) for name in group["names"]],
        }
        for group in GROUPS
    ]
    return make_engine(ds_config, bag, made if groups else None)


def visit(jobs: list[dict]) -> list[dict]:
    """Do several jobs of `visit_one`, whose engines share the processes."""
    return [visit_one(**job) for job in jobs]


def visit_one(
    ds_config: dict,
    target: str | None = None,
    source: str | None = None,
    steps: tuple = (),
    groups: bool = False,
    tag: str | None = None,
) -> dict:
    """Load a checkpoint into a new engine, step, save; return what this rank held on the way.

    Args:
        ds_config: the config of DeepSpeed; it says whether `source` is universal.
        target: folder of checkpoints to save to, as the tag "saved".
        source: folder of checkpoints to load from.
        steps: numbers of the steps to take.
        groups: whether the parameters are in GROUPS.
        tag: of the checkpoint to load, None for the latest.
    """
    engine = engine_of(ds_config, groups)
    result = {}
    if source is not None:
        path, _ = engine.load_checkpoint(source, tag=tag)
        assert path is not None
        result["loaded"] = encoded(engine)
    for step in steps:
        take_step(engine, step)
    result["stepped"] = encoded(engine)
    if target is not None:
        Path(target).mkdir(parents=True, exist_ok=True)
        engine.save_checkpoint(target, tag="saved")
    engine.destroy()
    return result


def encoded(engine) -> dict:
    """Return what `held` does; float32 moments of ours are encoded first, as the next step does."""
    base = base_optimizer(engine)
    dense = []
    for p, state in base.state.items():
        dense.append({w: state[w].detach().clone() for w in MOMENTS if w in state})
        if hasattr(base, "moments"):
            base.moments(p)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in base.param_groups
    ]
    return {**held(engine), "dense": dense, "groups": groups}


def settings(stage, offload=None, universal=True, **options):
    """Return a config of DeepSpeed that loads universal checkpoints or ordinary ones."""
    made = config(stage, offload, **options)
    return made | ({"checkpoint": {"load_universal": True}} if universal else {})


__all__ = ["GROUPS", "Parts", "engine_of", "encoded", "settings", "torch", "visit", "visit_one"]
