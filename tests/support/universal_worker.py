# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the tests of universal checkpoints run: load, look, step, save."""

from convert_model import SHAPES
from ranks import error_of
from zero_worker import MOMENTS, Bag, base_optimizer, config, held, make_engine, take_step


class Parts(Bag):
    """Parameters of every kind of place in a universal checkpoint; gradients as those of `Bag`."""

    SHAPES = SHAPES


GROUPS = (
    {"names": ("embed", "lora_b", "small"), "lr": 2e-2, "weight_decay": 0.0, "betas": [0.8, 0.99]},
    {"names": ("wide", "conv", "bias", "single", "unused", "frozen"), "weight_decay": 0.25},
)


def visit(jobs: list[dict]) -> list[dict]:
    """Do several jobs of `visit_one`, one after the other."""
    return [visit_one(**job) for job in jobs]


def visit_one(
    ds_config: dict,
    source: str | None = None,
    steps: tuple = (),
    target: str | None = None,
    grouped: bool = True,
) -> dict:
    """Load a checkpoint into a new engine, step, save; return what this rank held on the way."""
    engine = engine_of(ds_config, grouped)
    result = {}
    if source is not None:
        path, _ = engine.load_checkpoint(source)
        assert path is not None
        result["loaded"] = encoded(engine)
    for step in steps:
        take_step(engine, step)
    result["stepped"] = encoded(engine)
    if target is not None:
        engine.save_checkpoint(target, tag="saved")
    engine.destroy()
    return result


def engine_of(ds_config: dict, grouped: bool = True):
    """Return a new engine over `Parts`, in GROUPS or all in one group."""
    bag = Parts()
    groups = [
        {
            **{key: value for key, value in group.items() if key != "names"},
            "params": [getattr(bag, name) for name in group["names"]],
        }
        for group in GROUPS
    ]
    return make_engine(ds_config, bag, groups if grouped else None)


def encoded(engine) -> dict:
    """Return what `held` does, and the moments as they arrived and the options of the groups.

    float32 moments of ours are encoded before, as the next step does.
    """
    base = base_optimizer(engine)
    arrived = []
    for p, state in base.state.items():
        arrived.append({w: state[w].detach().clone() for w in MOMENTS if w in state})
        if hasattr(base, "moments"):
            base.moments(p)
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in base.param_groups
    ]
    return {**held(engine), "arrived": arrived, "options": options}


def error_of_load(ds_config: dict, source: str, grouped: bool = True):
    """Return the error of a load into a new engine."""
    return error_of(engine_of(ds_config, grouped).load_checkpoint, source)


def settings(stage, offload=None, universal=True, **options):
    """Return a config of DeepSpeed that loads universal checkpoints or ordinary ones."""
    made = config(stage, offload, **options)
    return made | ({"checkpoint": {"load_universal": True}} if universal else {})
