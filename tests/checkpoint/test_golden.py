# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every kind that are out in the world are read as what they were.

`PYTHONPATH=.:tests/support python tests/checkpoint/test_golden.py` makes them again.  Do that only
together with a new format version, under new names: these files stand for the checkpoints that
users have.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from fragments import fragments_in
from fsdp_worker import start
from places import GOLDEN
from ranks import run_ranks
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from zero_worker import base_optimizer, config, make_engine

from zero8 import Adam8bitBlockwise
from zero8.checkpoint.read.open import open_checkpoint
from zero8.deepspeed import swap_file

KINDS = {
    "plain_checkpoint.pt": "plain",
    "zero2_checkpoint": "zero",
    "zero3_checkpoint": "zero",
    "dcp_checkpoint": "dcp",
}
NAMES = {"wide.weight", "wide.bias", "narrow.weight"}


def expected_of(name):
    """Return the moments of each run of elements, by (parameter, first element, elements)."""
    ranks = torch.load(GOLDEN / "checkpoint_moments.pt", weights_only=True)[name]
    runs = [run for rank in ranks for run in rank]
    return {(label, first, len(m)): (m, v) for label, first, m, v in runs}


def runs_of(fragments):
    found = {}
    for fragment in fragments:
        piece = fragment.piece
        moments = tuple(store.read(0, piece.numel) for store in fragment.stores)
        found[fragment.name, piece.first, piece.numel] = moments
    return found


@pytest.mark.parametrize("name", KINDS)
def test_golden_checkpoint_decodes_to_the_moments_of_its_run(name):
    source = open_checkpoint(GOLDEN / name)
    assert source.facts().kind == KINDS[name]
    fragments = [one for one in fragments_in(source) if one.file.suffix != ".swp"]
    assert {one.name for one in fragments} == NAMES
    assert {one.step for one in fragments} == {3}
    assert all(one.weights.isfinite().all() for one in fragments)
    groups = source.groups()
    assert {group["lr"] for group in groups} == {1e-2}
    assert {label for group in groups for label in group["params"]} == NAMES
    found, expected = runs_of(fragments), expected_of(name)
    assert sum(key[2] for key in found) == sum(key[2] for key in expected)
    for (label, first, numel), moments in expected.items():
        (run,) = (  # of a folder of DCP, all of a parameter
            (begin, there)
            for (one, begin, held), there in found.items()
            if one == label and begin <= first and first + numel <= begin + held
        )
        kept = torch.arange(first, first + numel)
        if (name, label) == ("dcp_checkpoint", "narrow.weight"):
            # Rows of 30 in blocks of 8: what the ranks cut after row 12 is encoded as one.
            kept = kept[(kept < 240) | (kept >= 480)]
        for got, m in zip(run[1], moments, strict=True):
            assert torch.equal(got[kept - run[0]], m[kept - first])


def test_golden_swap_file_decodes_to_the_moments_of_its_run():
    source = open_checkpoint(GOLDEN / "zero3_checkpoint")
    swapped = [one for one in fragments_in(source) if one.file.suffix == ".swp"]
    found, expected = runs_of(swapped), expected_of("zero3_checkpoint")
    assert found
    for key, moments in found.items():
        assert all(torch.equal(*pair) for pair in zip(expected[key], moments, strict=True))


# --- How they were made --------------------------------------------------------------------------

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


def moments_of(optimizer) -> list[tuple[str, int, torch.Tensor, torch.Tensor]]:
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
    return moments_of(optimizer)


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
    return moments_of(optimizer)


def plain(path: Path):
    """Train without either and save; return what the moments are."""
    model = Model()
    optimizer = trained(model)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return moments_of(optimizer)


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


if __name__ == "__main__":
    import test_golden  # by a name that ranks can import

    test_golden.write_all(GOLDEN)
