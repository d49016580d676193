# SPDX-License-Identifier: Apache-2.0
"""torchtitan: its container of optimizers, its schedulers, and its checkpoints of flat names."""

from pathlib import Path

import pytest
import torch
from fsdp_worker import LAYOUTS, Weights, differing, sharded, start, whole
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from zero8 import Adam8bitBlockwise
from zero8.integrations.torchtitan import Adam8bitContainer

pytestmark = pytest.mark.integrations

STEPS, MORE = 3, 5
DECAYED = r"^(?!vector)"


class Position(Stateful):
    """Stands for what torchtitan saves of its data loader."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, _: dict) -> None: ...


def config(name: str = "Adam8bitBlockwise", **whole_optimizer) -> OptimizersContainer.Config:
    """Return a config of two groups; keywords are those that hold for a whole optimizer."""
    options = {"lr": 0.01, "betas": (0.9, 0.95)}
    if name != "Adam8bitBlockwise":
        options["fused"] = False
    groups = {DECAYED: {"weight_decay": 0.1}, r".*": {"weight_decay": 0.0}}
    return Adam8bitContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=options | more)
            for pattern, more in groups.items()
        ],
        optimizer_factory_kwargs_by_name={name: whole_optimizer},
    )


class Job:
    """What torchtitan's trainer makes of a model and a config, without the trainer."""

    def __init__(self, model: nn.Module, optimizer: OptimizersContainer.Config, folder: Path, mode):
        """Build the container, its schedulers and the checkpoint manager, in the trainer's way."""
        self.model = model
        self.optimizers = optimizer.build(model_parts=[model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=5).build(
            optimizers=self.optimizers, training_steps=STEPS + MORE
        )
        self.checkpoints = CheckpointManager.Config(
            enable=True,
            folder="checkpoint",
            interval=STEPS,
            async_mode=mode,
            keep_latest_k=0,
            initial_load_model_only=False,
        ).build(
            dataloader=Position(),
            model_parts=[model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def train(self, begin: int, end: int) -> None:
        """Take the steps from `begin` to `end`."""
        for step in range(begin, end):
            self.model(step).backward()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()

    def bits(self) -> dict[str, dict]:
        """Return by parameter its values, its group and the entries of its state, all whole."""
        found = {}
        for optimizer in self.optimizers:
            saved = optimizer.state_dict()
            pairs = zip(optimizer.param_groups, saved["param_groups"], strict=True)
            for group, numbered in pairs:
                settings = {k: v for k, v in numbered.items() if k not in ("params", "param_names")}
                names = zip(group["param_names"], group["params"], numbered["params"], strict=True)
                for name, p, number in names:
                    entries = {k: whole(v) for k, v in saved["state"][number].items()}
                    found[name] = {"values": whole(p.detach()), **settings, **entries}
        return found


def job(folder: Path, layout: str, mode: str = "disabled", alone: bool = False, **kinds) -> Job:
    """Return a job, under FSDP2 unless it is alone; `kinds` are keywords of `config`."""
    if not alone:
        start()
    model = Weights(LAYOUTS[layout].dtype) if alone else sharded(LAYOUTS[layout])
    keywords = dict(LAYOUTS[layout].keywords) | kinds
    return Job(model, config(**keywords), folder, mode)


def save_and_resume(folder: Path, layout: str, mode: str = "disabled", alone: bool = False):
    """Train, write a checkpoint, and train on; load it over zeros and train on: bits are equal.

    Returns them as loaded, and at the end.
    """
    trained = job(folder, layout, mode, alone)
    trained.train(0, STEPS)
    saved = trained.bits()
    assert trained.checkpoints.save(STEPS)
    trained.train(STEPS, STEPS + MORE)  # while it is written
    trained.checkpoints.maybe_wait_for_saving()
    if not alone:
        torch.distributed.barrier()
    loaded, end = resume(folder, layout, alone)
    assert differing(loaded, saved) == [] and differing(end, saved) != []
    assert differing(end, trained.bits()) == []
    return loaded, end


def resume(folder: Path, layout: str, alone: bool = False) -> tuple:
    """Load the checkpoint into a model of zeros, and train on; return `bits` of both."""
    resumed = job(folder, layout, alone=alone)
    with torch.no_grad():
        for p in resumed.model.parameters():
            p.zero_()
    assert resumed.checkpoints.load()
    loaded = resumed.bits()
    resumed.train(STEPS, STEPS + MORE)
    return loaded, resumed.bits()


@pytest.mark.parametrize("layout", ["float32", "corrected"])
def test_checkpoint_of_one_process_loads_and_goes_on_with_the_same_bits(layout, tmp_path):
    loaded, end = save_and_resume(tmp_path, layout, alone=True)
    # Both groups have kept their settings, which the schedule has changed.
    assert [loaded[name]["weight_decay"] for name in ("odd", "vector")] == [0.1, 0.0]
    assert len({group["odd"][key] for group in (loaded, end) for key in ("lr", "initial_lr")}) == 3


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_checkpoint_of_two_ranks_loads_on_two_and_on_one_with_the_same_bits(
    mode, standing_ranks, tmp_path
):
    arguments = {"folder": tmp_path, "layout": "corrected", "mode": mode}
    expected, _ = standing_ranks(2).run(save_and_resume, **arguments)
    for got, wanted in zip(resume(tmp_path, "corrected", alone=True), expected, strict=True):
        assert differing(got, wanted, 1, 2) == []


def adamw_job(folder):
    trained = job(folder, "float32", alone=True, name="AdamW")
    trained.train(0, STEPS)
    assert trained.checkpoints.save(STEPS)
    return trained


def test_checkpoint_of_adamw_loads_in_fp32_only_and_else_changes_no_state(tmp_path):
    ours = job(tmp_path, "float32", alone=True)
    ours.train(0, 1)
    before = ours.bits()
    saved = adamw_job(tmp_path).optimizers.state_dict()
    with pytest.raises(ValueError, match='got no state.*loads only with state_dict_format="fp32"'):
        ours.optimizers.load_state_dict(saved)
    assert differing(ours.bits(), before) == []


def test_checkpoint_of_adamw_loads_with_the_bits_of_load_state_dict(tmp_path):
    adamw = adamw_job(tmp_path)
    loaded = job(tmp_path, "float32", alone=True, state_dict_format="fp32")
    assert loaded.checkpoints.load()
    (optimizer,), (theirs,) = loaded.optimizers, adamw.optimizers
    expected = Adam8bitBlockwise(theirs.param_groups)
    expected.load_state_dict(theirs.state_dict())
    optimizer.state_dict_format = "8bit"
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    ours, wanted = (o.state_dict()["state"] for o in (optimizer, expected))
    assert differing(*(dict(zip(names, s.values(), strict=True)) for s in (ours, wanted))) == []
    assert loaded.bits()["odd"]["step"] == STEPS
