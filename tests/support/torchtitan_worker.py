# SPDX-License-Identifier: Apache-2.0
"""torchtitan's optimizer container with our optimizer, its schedulers and its checkpoints."""

from pathlib import Path

import torch
from fsdp_worker import LAYOUTS, Weights, sharded, start, whole
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from zero8.integrations.torchtitan import Adam8bitContainer

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


def save(folder: Path, layout: str, mode: str = "disabled", alone: bool = False) -> tuple:
    """Train, write a checkpoint, and train on while it is written; return `bits` of both."""
    trained = job(folder, layout, mode, alone)
    trained.train(0, STEPS)
    saved = trained.bits()
    assert trained.checkpoints.save(STEPS)
    trained.train(STEPS, STEPS + MORE)
    trained.checkpoints.maybe_wait_for_saving()
    if not alone:
        torch.distributed.barrier()
    return saved, trained.bits()


def resume(folder: Path, layout: str, alone: bool = False) -> tuple:
    """Load the checkpoint into a model of zeros, and train on; returns as `save`."""
    resumed = job(folder, layout, alone=alone)
    with torch.no_grad():
        for p in resumed.model.parameters():
            p.zero_()
    assert resumed.checkpoints.load()
    loaded = resumed.bits()
    resumed.train(STEPS, STEPS + MORE)
    return loaded, resumed.bits()
