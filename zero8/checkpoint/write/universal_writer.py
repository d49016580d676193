# SPDX-License-Identifier: Apache-2.0
"""Writes a universal checkpoint of DeepSpeed, which engines of ZeRO 1, 2 and 3 load.

    latest_universal                        beside it: its name (`name_latest`)
    OUT/
        zero/<name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": float32 as the parameter}; the
                                            moments are those of the algorithm
        zero/<name>/step.pt                 a number
        zero/optimizer_state.pt             the parameter groups, at each stage's place, and the
                                            state of loss scaling
        mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00_model_states.pt
                                            progress and client state of the run; tensors of the
                                            model without moments (engines do not read frozen
                                            parameters and buffers from here)

It is in float32 and loads with the same codes and scales: quantize(dequantize(q)) is q.
"""

from pathlib import Path

import torch
from tqdm import tqdm

from zero8.checkpoint.read.contents import Contents, weights_of
from zero8.checkpoint.read.inert import Inert, names_in
from zero8.files.atomic import save
from zero8.files.inside import leads_out
from zero8.files.tags import LATEST_UNIVERSAL, write_latest
from zero8.spec.shown import shown

MODEL_FILES = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""The names for stages 1 and 2, and for stage 3."""
DEEPSPEED_VERSION = "0.19.8"
"""The version of DeepSpeed whose layout this is."""
_DYNAMIC_SCALER = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"


def write_universal(contents: Contents, path: Path) -> None:
    """Write the folder."""
    contents.check_is_named()
    for name in contents.names:
        if leads_out(name):
            raise ValueError(f"got a parameter called {shown(name)}, which cannot name a folder")
    contents.note_corrections(
        "included in the float32 master weights; a run with bfloat16 master weights loses them"
    )
    step = contents.step()
    trained = [
        name for name in contents.names if name in contents.model or name in contents.parameters
    ]
    for name in tqdm(trained, desc="write", unit="parameter", disable=None):
        _write_parameter(contents, name, step, path / "zero" / name)
        contents.release()
    _write_groups(contents, step, path / "zero" / "optimizer_state.pt")
    _write_run(contents, step, path)


def name_latest(path: Path) -> None:
    """Have engines load this folder where they are given the one that it is in."""
    write_latest(path.parent, path.name, LATEST_UNIVERSAL)


def _write_parameter(contents: Contents, name: str, step: int, folder: Path) -> None:
    folder.mkdir(parents=True)
    weights = weights_of(contents, name)
    save({"param": weights}, folder / "fp32.pt")
    parameter = contents.parameters.get(name)
    for number, moment in enumerate(contents.algorithm_of(name).moment_names):
        if parameter is None:
            values = torch.zeros_like(weights)
        else:
            values = parameter.stores[number].dense.view(weights.shape)
        save({"param": values}, folder / f"{moment}.pt")
    save(step, folder / "step.pt")


def _write_groups(contents: Contents, step: int, path: Path) -> None:
    groups = [{**contents.settings(group), "params": []} for group in contents.groups]
    for_stage3 = {"state": {0: {"step": step}}, "param_groups": groups}
    save(
        {
            **_scaling(contents.source.scaling),
            "param_groups": groups,
            "optimizer_state_dict": for_stage3,
            "ds_version": DEEPSPEED_VERSION,
        },
        path,
    )


def _scaling(found: dict) -> dict:
    """Return the state of loss scaling with DeepSpeed's object; a fixed scale is the config's."""
    scaler = found.get("loss_scaler")
    rest = {key: value for key, value in found.items() if not names_in(value)}
    is_dynamic = isinstance(scaler, Inert) and scaler.name == _DYNAMIC_SCALER
    if not is_dynamic or not isinstance(scaler.state, dict) or names_in(scaler.state):
        return rest
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    made = DynamicLossScaler.__new__(DynamicLossScaler)  # as pickle makes it
    vars(made).update(scaler.state)
    return rest | {"loss_scaler": made}


def _shapes(contents: Contents) -> list[dict[str, torch.Size]] | None:
    """Return the shapes of trained parameters by group, for comparison with an engine's.

    None if some have no moments: they may be frozen, or never have got a gradient.
    """
    if not contents.parameters.keys() >= set(contents.names):
        return None
    return [
        {name: torch.Size(contents.parameters[name].shape) for name in group["params"]}
        for group in contents.groups
    ]


def _write_run(contents: Contents, step: int, folder: Path) -> None:
    run, tied = contents.source.run, contents.source.tied
    rest = {
        name: values
        for name, values in contents.model.items()
        if tied.get(name, name) not in contents.parameters
    }
    if rest:
        contents.notes.append(
            "engines do not read frozen parameters and buffers from universal checkpoints: tensors "
            f'without moments are under "module" in the model-state files: {list(rest)}'
        )
    others = {key: names for key, value in run.items() if (names := names_in(value))}
    for key, names in others.items():
        contents.notes.append(f"{key!r} was left out: it holds objects of {sorted(names)}")
    states = {
        "module": rest,
        "param_shapes": _shapes(contents),
        "global_steps": step,
        "skipped_steps": 0,
        "lr_scheduler": None,
        **{key: value for key, value in run.items() if key not in others},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": DEEPSPEED_VERSION,
    }
    for name in MODEL_FILES:
        save(states, folder / name)
