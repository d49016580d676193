# SPDX-License-Identifier: Apache-2.0
"""Folders of torch.distributed.checkpoint with an INT8 weight as its codes and its scales."""

from pathlib import Path

import torch
from fsdp_worker import start
from int8_weights import int8_param
from small_optimizers import param, set_grads
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from zero8 import Adam8bitBlockwise

NAME = "layer.weight"
SHAPE = (40, 300)
CODES, SCALES = f"{NAME}.int_data", f"{NAME}.scale"


def trained(dtype: torch.dtype = torch.float32) -> tuple[dict[str, nn.Parameter], dict]:
    """Return an INT8 weight and a bias after two steps, and the content of a checkpoint of them."""
    weight = int8_param(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), dtype)
    params = {NAME: weight, "layer.bias": param(40)}
    optimizer = Adam8bitBlockwise(list(params.items()), lr=1e-2, weight_decay=0.1)
    for step in range(2):
        set_grads(list(params.values()), step)
        optimizer.step()
    saved = optimizer.state_dict()
    states = {name: saved["state"][number] for number, name in enumerate(params)}
    groups = [{**saved["param_groups"][0], "params": list(params)}]
    model = {CODES: weight.int_data, SCALES: weight.scale, "layer.bias": params["layer.bias"]}
    return params, {"model": model, "optimizer": {"state": states, "param_groups": groups}}


def save(folder: Path, content: dict) -> Path:
    """Write a folder by one process."""
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def save_cut(folder: Path, cut: list[str]) -> None:
    """Write a folder by all ranks, with some of codes, scales and moments cut between rows."""
    start()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def rows_of(values: object) -> object:
        is_cut = isinstance(values, Tensor) and len(values) == SHAPE[0]
        return distribute_tensor(values, mesh, [Shard(0)]) if is_cut else values

    _, content = trained()
    model, states = content["model"], content["optimizer"]["state"]
    model |= {key: rows_of(model[key]) for key in (CODES, SCALES) if key in cut}
    if "moments" in cut:
        states[NAME] = {key: rows_of(value) for key, value in states[NAME].items()}
    dcp.save(content, checkpoint_id=folder)
