# SPDX-License-Identifier: Apache-2.0
"""One small optimizer's state as a checkpoint of every kind, written without any engine."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from small_optimizers import param, run

from zero8 import Adam8bitBlockwise
from zero8.deepspeed.moment_tensor import MomentTensor
from zero8.spec.adam import ADAM
from zero8.spec.codec import codec_named
from zero8.state.extent import Extent
from zero8.state.plain import PlainState
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable

# Rows of a ragged length, narrow rows in groups, float32 moments.
SHAPES = {"wide": (40, 300), "narrow": (600, 16), "bias": (300,)}
STEPS = 3


def trained(
    codec: str = "log", shapes: dict[str, tuple[int, ...]] = SHAPES
) -> tuple[dict[str, torch.nn.Parameter], Adam8bitBlockwise]:
    params = {name: param(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    optimizer = Adam8bitBlockwise(list(params.items()), lr=0.01, codec=codec)
    run(optimizer, list(params.values()), STEPS)
    return params, optimizer


def plain_file(path: Path, codec: str = "log") -> Path:
    params, optimizer = trained(codec)
    model = {name: p.detach() for name, p in params.items()}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, path)
    return path


def dcp_folder(path: Path, codec: str = "log", shapes: dict[str, tuple[int, ...]] = SHAPES) -> Path:
    params, optimizer = trained(codec, shapes)
    saved = optimizer.state_dict()
    states = {name: saved["state"][n] for n, name in enumerate(params)}
    groups = [{**saved["param_groups"][0], "params": list(params)}]
    whole = {"model": dict(params), "optimizer": {"state": states, "param_groups": groups}}
    dcp.save(whole, checkpoint_id=path, no_dist=True)
    return path


def zero_folder(path: Path, world_size: int = 2, codec: str = "log") -> Path:
    """The folder of a tag as ZeRO-2 has it, a file for each rank, under a folder with `latest`.

    The parameters lie one after the other; the boundary between ranks cuts a block.
    """
    params, optimizer = trained(codec)
    tag = path / "global_step3"
    tag.mkdir(parents=True)
    total = sum(p.numel() for p in params.values())
    size = -(-total // world_size)
    for rank in range(world_size):
        states, weights = _partition(params, optimizer, rank * size, size, codec)
        zero = {
            "base_optimizer_state": {
                "state": {0: states},
                "param_groups": [{**optimizer.defaults, "params": [0]}],
            },
            "single_partition_of_fp32_groups": [weights],
            "zero_stage": 2,
            "partition_count": [world_size],
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": zero, "ds_version": "0"}, tag / name)
    shapes = [{name: torch.Size(shape) for name, shape in SHAPES.items()}]
    torch.save({"module": {}, "param_shapes": shapes}, tag / "mp_rank_00_model_states.pt")
    (path / "latest").write_text(tag.name)
    return path


def _partition(params, optimizer, begin, size, codec) -> tuple[dict, torch.Tensor]:
    """Return the state and the weights of elements begin .. begin + size - 1 of all parameters."""
    pieces, values, at = [], {which: torch.zeros(size) for which in ADAM.moment_names}, 0
    weights = torch.zeros(size)
    for name, p in params.items():
        extent = Extent.whole(tuple(p.shape))
        stores = PlainState(optimizer.state[p], extent).stores(name)
        (whole,) = stores[0].table.pieces
        first, end = max(begin - at, 0), min(begin + size - at, p.numel())
        if first < end:
            start = at + first - begin
            pieces.append(replace(whole, start=start, first=first, numel=end - first))
            here = slice(start, start + end - first)
            weights[here] = p.detach().view(-1)[first:end]
            for store in stores:
                values[store.name][here] = store.read(first, end - first)
        at += p.numel()
    table = PieceTable(tuple(pieces), size)
    state: dict = {"step": STEPS, "history": 1.0}
    for which in ADAM.moment_names:
        store = MomentStore.zeros(codec_named(codec), ADAM.moment(which), table)
        store.write(0, values[which])
        state[which] = MomentTensor(store)
    return state, weights


KINDS = {"plain": plain_file, "dcp": dcp_folder, "zero": zero_folder}
