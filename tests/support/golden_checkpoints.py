# SPDX-License-Identifier: Apache-2.0
"""Makes a small checkpoint of every kind, and says what its moments are."""

import shutil
import tempfile
from pathlib import Path

import torch
from fsdp_worker import start
from ranks import run_ranks
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from zero_worker import base_optimizer, config, make_engine

from zero8 import Adam8bitBlockwise
from zero8.deepspeed import swap_file

STEPS = 3
SETTINGS = {"lr": 1e-2, "min_8bit_size": 100}
BESIDE = ("zero_to_fp32.py", "zero_to_torch.py", ".zero8_lock", "step3/zero8_manifest.json")
"""What engines put beside the states."""


class Model(nn.Module):
    """Rows that are cut into blocks, narrow ones, and a vector."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.wide = nn.Linear(300, 5)
        self.narrow = nn.Embedding(24, 30)

    def forward(self, x):
        return self.wide(x).square().mean() + self.narrow.weight[::2].square().sum() / 100


def inputs(step: int) -> torch.Tensor:
    return torch.randn(2, 300, generator=torch.Generator().manual_seed(step))


def decoded(optimizer) -> list[tuple[str, int, torch.Tensor, torch.Tensor]]:
    """Return the name, the first element and both moments of all runs of elements here."""
    found = []
    for p, state in optimizer.state.items():
        if not state:
            continue
        stores = optimizer.moments(p)
        for piece in stores[0].table.pieces:
            moments = [store.read(piece.start, piece.numel).clone() for store in stores]
            found.append((piece.name, piece.first, *moments))
    return found


def zero(stage: int, folder: str):
    """Train under ZeRO and save; return what this rank's moments are."""
    options = {"sub_group_size": 1200, "stage3_param_persistence_threshold": 0}
    made = config(stage=stage, zero=options if stage == 3 else None, min_8bit_size=100)
    engine = make_engine(made, Model())
    for step in range(STEPS):
        engine.backward(engine(inputs(step)))
        engine.step()
    engine.save_checkpoint(folder, tag="step3")
    optimizer = base_optimizer(engine)
    if stage == 3 and torch.distributed.get_rank() == 0:
        # The file that a sub-group would have on NVMe, where ones so small never are.
        swapped = Path(folder, "step3", "offloaded_tensors", "rank00")
        swapped.mkdir(parents=True)
        state = next(state for state in optimizer.state.values() if state)
        swap_file.save(str(swapped / "zero8-1.tensor.swp"), state)
    return decoded(optimizer)


def trained(model: nn.Module) -> Adam8bitBlockwise:
    optimizer = Adam8bitBlockwise(model.named_parameters(), **SETTINGS)
    for step in range(STEPS):
        model(inputs(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def fsdp(folder: str):
    """Train under FSDP2 and save; return what this rank's moments are."""
    start()
    model = fully_shard(Model())
    optimizer = trained(model)
    model_states, states = get_state_dict(model, optimizer)
    dcp.save({"model": model_states, "optimizer": states}, checkpoint_id=folder)
    return decoded(optimizer)


def plain(path: Path):
    """Train without either and save; return what the moments are."""
    model = Model()
    optimizer = trained(model)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return decoded(optimizer)


def write_all(folder: Path) -> None:
    """Write all checkpoints into a folder, and `checkpoint_moments.pt`: what they decode to."""
    moments = {"plain_checkpoint.pt": [plain(folder / "plain_checkpoint.pt")]}
    with tempfile.TemporaryDirectory() as work:
        for name, function, arguments in (
            ("zero2_checkpoint", zero, {"stage": 2}),
            ("zero3_checkpoint", zero, {"stage": 3}),
            ("dcp_checkpoint", fsdp, {}),
        ):
            shutil.rmtree(folder / name, ignore_errors=True)
            place = {"folder": str(folder / name)}
            moments[name] = run_ranks(function, 2, Path(work, name), **arguments, **place)
            for other in BESIDE:
                (folder / name / other).unlink(missing_ok=True)
    torch.save(moments, folder / "checkpoint_moments.pt")
