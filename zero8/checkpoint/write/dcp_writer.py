# SPDX-License-Identifier: Apache-2.0
"""Writes a folder of `torch.distributed.checkpoint` with the state dicts of model and optimizer."""

import warnings
from pathlib import Path

import torch

from zero8.checkpoint.read.contents import Contents
from zero8.spec.codec import CODECS, DEFAULT_CODEC
from zero8.spec.dither import identity_of
from zero8.state.extent import Extent
from zero8.state.plain import saved_form
from zero8.state.policy import Policy
from zero8.state.table import Piece
from zero8.state.target import Target


def write_dcp(contents: Contents, path: Path) -> None:
    """Write the state dicts of `get_state_dict` under the keys "model" and "optimizer".

    `get_state_dict` expects states of all parameters, so parameters that never got a gradient get
    zeros at step 0, which have no effect.
    """
    from torch.distributed import checkpoint

    contents.check_is_named()
    _check_are_alike(contents)
    state = {name: parameter.entries() for name, parameter in contents.parameters.items()}
    if without := [name for name in contents.names if name not in state and name in contents.model]:
        state |= _zeros(contents, without)
        contents.notes.append(f"got no states of {without}; wrote zeros at step 0")
    groups = [
        {
            **contents.settings(group),
            "params": list(group["params"]),
            "param_names": list(group["params"]),
        }
        for group in contents.groups
    ]
    optimizer = {"state": state, "param_groups": groups}
    model = {"model": contents.model} if contents.model else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing process group
            checkpoint.save({**model, "optimizer": optimizer}, checkpoint_id=path, no_dist=True)
    except checkpoint.CheckpointException as error:  # not a subclass of Exception
        raise RuntimeError(f"torch.distributed.checkpoint failed: {error}") from error


def _check_are_alike(contents: Contents) -> None:
    by_kind = {parameter.is_of_fp32: name for name, parameter in contents.parameters.items()}
    ours, fp32 = contents.algorithm.class_name, contents.algorithm.fp32_name
    if len(by_kind) > 1:
        raise ValueError(
            f"got 8-bit moments of {by_kind[False]} and {fp32}'s of {by_kind[True]}; load the "
            f"checkpoint with {ours}, save it again, and convert that"
        )
    if True in by_kind:
        contents.notes.append(
            f"got moments of {fp32}, which stay float32, for that optimizer or for {ours} with "
            'state_dict_format="fp32"'
        )


def _zeros(contents: Contents, names: list[str]) -> dict[str, dict]:
    """Return zero states for these parameters, in the form of the others' states."""
    shapes = {name: tuple(contents.model[name].shape) for name in names}
    found = contents.parameters.values()
    if all(parameter.is_of_fp32 for parameter in found):
        return {
            name: {"step": torch.tensor(0.0)}
            | {key: torch.zeros(shape) for key in contents.algorithm_of(name).moment_names}
            for name, shape in shapes.items()
        }
    like = next((parameter for parameter in found if parameter.piece.is_quantized), None)
    states = {}
    for name, shape in shapes.items():
        grid = Policy(block_size=like.piece.block_size).decide(name, shape).grid if like else None
        size, extent = grid.block_size if grid else 0, Extent.whole(shape)
        piece = Piece(0, extent.numel, 0, shape, identity_of(name), size, name)
        codec = like.stores[0].codec if like else CODECS[DEFAULT_CODEC]
        target = Target(contents.algorithm_of(name), codec, piece, extent)
        states[name] = saved_form(target.new(), extent)
    return states
