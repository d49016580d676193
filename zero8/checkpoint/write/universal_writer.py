# SPDX-License-Identifier: Apache-2.0
"""Writes a universal checkpoint of DeepSpeed, which engines of ZeRO 1, 2 and 3 load.

    OUT/latest_universal                    the name of the folder beside it
    OUT/global_step<n>_universal/
        zero/<name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": float32 as the parameter}; the
                                            moments are those of the algorithm
        zero/<name>/step.pt                 a number
        zero/optimizer_state.pt             the parameter groups, at each stage's place
        mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00_model_states.pt
                                            counters of the run; tensors of the model without
                                            moments (engines do not read frozen parameters and
                                            buffers from here)

It is in float32 and loads with the same codes and scales: quantize(dequantize(q)) is q.
"""

import os
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from zero8.checkpoint.files.inside import leads_out
from zero8.checkpoint.files.staging import Staging, save
from zero8.checkpoint.files.tags import LATEST_UNIVERSAL, write_latest
from zero8.checkpoint.read.contents import Contents, weights_of
from zero8.spec.shown import shown

MODEL_FILES = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""The names for stages 1 and 2, and for stage 3."""
DEEPSPEED_VERSION = "0.19.8"
"""The version of DeepSpeed whose layout this is."""


def write_universal(contents: Contents, path: Path, staging: Staging) -> None:
    """Write the folder.

    Raises:
        ValueError: if parameters have no weights, or names that cannot be those of folders, or
            different step counts, as ZeRO has a single one.
    """
    contents.check_is_named()
    for name in contents.names:
        if leads_out(name):
            raise ValueError(f"got a parameter called {shown(name)}, which cannot name a folder")
    contents.note_corrections(
        "included in the float32 master weights; a run with bfloat16 master weights loses them"
    )
    step = contents.step()
    folder = path / f"global_step{step}_universal"
    trained = [
        name for name in contents.names if name in contents.model or name in contents.parameters
    ]
    for name in tqdm(trained, desc="write", unit="parameter", disable=None):
        _write_parameter(contents, name, step, folder / "zero" / name)
    _write_groups(contents, step, folder / "zero" / "optimizer_state.pt")
    _write_counters(contents, step, folder)
    write_latest(path, folder.name, LATEST_UNIVERSAL)


def _write_parameter(contents: Contents, name: str, step: int, folder: Path) -> None:
    folder.mkdir(parents=True)
    weights = weights_of(contents, name)
    _save_values(weights, folder / "fp32.pt")
    parameter = contents.parameters.get(name)
    for number, moment in enumerate(contents.algorithm_of(name).moment_names):
        if parameter is None:
            values = torch.zeros_like(weights)
        else:
            values = parameter.stores[number].read(0, parameter.piece.numel).view(weights.shape)
        _save_values(values, folder / f"{moment}.pt")
    save(step, folder / "step.pt")


def _save_values(values: Tensor, path: Path) -> None:
    save({"param": values}, path)


def _write_groups(contents: Contents, step: int, path: Path) -> None:
    groups = [{**contents.settings(group), "params": []} for group in contents.groups]
    for_stage3 = {"state": {0: {"step": step}}, "param_groups": groups}
    save(
        {
            "param_groups": groups,
            "optimizer_state_dict": for_stage3,
            "ds_version": DEEPSPEED_VERSION,
        },
        path,
    )


def _write_counters(contents: Contents, step: int, folder: Path) -> None:
    rest = {
        name: values
        for name, values in contents.model.items()
        if contents.tied.get(name, name) not in contents.parameters
    }
    if rest:
        contents.notes.append(
            "engines do not read frozen parameters and buffers from universal checkpoints: tensors "
            f'without moments are under "module" in the model-state files: {list(rest)}'
        )
    states = {
        "module": rest,
        "global_steps": step,
        "skipped_steps": 0,
        "lr_scheduler": None,
        **contents.counters,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": DEEPSPEED_VERSION,
    }
    first, second = (folder / name for name in MODEL_FILES)
    save(states, first)
    try:
        os.link(first, second)
    except OSError:  # a file system without links
        save(states, second)
