# SPDX-License-Identifier: Apache-2.0
"""Writes one file of `torch.save`: {"model": ..., "optimizer": ...}, for one process.

Without weights, as for the optimizer.pt of Hugging Face's Trainer, it is the optimizer's state dict
alone.  The optimizer is one of zero8, an fp32 one such as torch's AdamW, or bitsandbytes'
AdamW8bit.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero8.checkpoint.read.contents import Contents
from zero8.checkpoint.read.foreign import to_bitsandbytes
from zero8.files.atomic import save
from zero8.spec.algorithm import Algorithm


def write_plain(contents: Contents, path: Path) -> None:
    """Write the state dict of our optimizer, with the same codes."""
    state = {name: parameter.entries() for name, parameter in contents.parameters.items()}
    _save(contents, contents.model, _packed(contents, state), path)


def write_fp32(contents: Contents, path: Path) -> None:
    """Write a state dict of the fp32 optimizer, torch's AdamW for Adam's states."""
    contents.note_corrections("included in the weights, which are float32 of 24 bits")
    state = {name: p.in_float32() for name, p in contents.parameters.items()}
    packed = _packed(contents, state)
    packed["param_groups"] = [
        _fp32_group(contents.algorithm, group) for group in packed["param_groups"]
    ]
    _save(contents, _corrected(contents), packed, path)


def write_bitsandbytes(contents: Contents, path: Path) -> None:
    """Write a state dict of bitsandbytes' AdamW8bit; needs memory for all codes."""
    if dense := [name for name, p in contents.parameters.items() if p.is_of_fp32]:
        raise ValueError(
            f"{dense[0]}: got moments of an fp32 Adam, expected 8-bit ones: load the checkpoint "
            'with Adam8bitBlockwise(codec="dynamic"), and save it again'
        )
    contents.note_corrections("lost, as bitsandbytes has no such entry")
    state = {name: parameter.entries() for name, parameter in contents.parameters.items()}
    _save(contents, contents.model, to_bitsandbytes(_packed(contents, state)), path)


def _fp32_group(algorithm: Algorithm, group: dict[str, Any]) -> dict[str, Any]:
    """Return a group as the fp32 optimizer has it, with what it may lack."""
    flags = {key: value for key, value in algorithm.options.items() if isinstance(value, bool)}
    return algorithm.fp32_group({**algorithm.fp32_options, **flags, **group})


def _corrected(contents: Contents) -> dict[str, Tensor]:
    """Return the model with the corrections applied to its weights."""
    model, owner = dict(contents.model), dict(contents.source.tied)
    for name, parameter in contents.parameters.items():
        if parameter.weights is None or parameter.correction is None:
            continue
        for other in model.keys() - set(contents.names) - owner.keys():
            # A further name of the parameter, if the checkpoint does not list shared parameters.
            if torch.equal(model[other], model[name]):
                owner[other] = name
        model[name] = parameter.corrected_weights()
    return {name: model[owner.get(name, name)] for name in model}


def _packed(contents: Contents, state: dict[str, dict]) -> dict:
    """Return a state dict with numbers instead of names, as torch's optimizers have."""
    numbers = {name: number for number, name in enumerate(contents.names)}
    groups = []
    for group in contents.groups:
        params = [numbers[name] for name in group["params"]]
        names = {"param_names": list(group["params"])} if contents.is_named else {}
        groups.append({**contents.settings(group), "params": params, **names})
    ordered = sorted(state, key=numbers.__getitem__)
    return {"state": {numbers[name]: state[name] for name in ordered}, "param_groups": groups}


def _save(contents: Contents, model: dict, optimizer: dict, path: Path) -> None:
    whole = {"model": model, "optimizer": optimizer} if model else optimizer
    save(whole, path, contents.release)
