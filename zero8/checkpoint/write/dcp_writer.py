# SPDX-License-Identifier: Apache-2.0
"""Writes a folder of `torch.distributed.checkpoint` with the state dicts of model and optimizer."""

import math
import warnings
from dataclasses import replace
from pathlib import Path

from zero8.checkpoint.read.contents import Contents
from zero8.spec.codec import CODECS, DEFAULT_CODEC
from zero8.spec.dither import identity_of
from zero8.state.memory import new_memory
from zero8.state.policy import Policy
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable


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
        state |= {name: _zeros(contents, name) for name in without}
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
        raise OSError(f"torch.distributed.checkpoint failed: {error}") from error


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


def _zeros(contents: Contents, name: str) -> dict:
    """Return the zero state of a parameter, in the form of the others' states."""
    like = max(contents.parameters.values(), key=lambda one: one.piece.block_size)
    shape, algorithm = tuple(contents.model[name].shape), contents.algorithm_of(name)
    size = like.piece.block_size
    grid = Policy(block_size=size).decide(name, shape).grid if size else None
    piece = Piece(
        0, math.prod(shape), 0, shape, identity_of(name), grid.block_size if grid else 0, name
    )
    table, codec = PieceTable((piece,), piece.numel), like.stores[0].codec or CODECS[DEFAULT_CODEC]
    stores = tuple(MomentStore.zeros(codec, rule, table) for rule in algorithm.moments)
    zero = replace(like, name=name, step=0, memory=new_memory(algorithm), stores=stores)
    return replace(zero, correction=None).entries()
