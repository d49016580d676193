# SPDX-License-Identifier: Apache-2.0
"""One small optimizer's state as a file, and as a folder of torch.distributed.checkpoint."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from small_optimizers import param, run

from zero8 import Adam8bitBlockwise

# Rows of a ragged length, narrow rows in groups, rows of several dimensions, float32 moments.
SHAPES = {"wide": (40, 300), "narrow": (600, 16), "conv": (64, 8, 3, 3), "bias": (300,)}
STEPS = 3


def trained(codec: str = "log") -> tuple[dict[str, torch.nn.Parameter], Adam8bitBlockwise]:
    params = {name: param(*shape, seed=n) for n, (name, shape) in enumerate(SHAPES.items())}
    optimizer = Adam8bitBlockwise(list(params.items()), lr=0.01, codec=codec)
    run(optimizer, list(params.values()), STEPS)
    return params, optimizer


def plain_file(path: Path, codec: str = "log") -> Path:
    params, optimizer = trained(codec)
    model = {name: p.detach() for name, p in params.items()}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, path)
    return path


def dcp_folder(path: Path, codec: str = "log") -> Path:
    params, optimizer = trained(codec)
    saved = optimizer.state_dict()
    states = {name: saved["state"][n] for n, name in enumerate(params)}
    groups = [{**saved["param_groups"][0], "params": list(params)}]
    whole = {"model": dict(params), "optimizer": {"state": states, "param_groups": groups}}
    dcp.save(whole, checkpoint_id=path, no_dist=True)
    return path
