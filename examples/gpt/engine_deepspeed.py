# SPDX-License-Identifier: Apache-2.0
"""Training under DeepSpeed: a JSON config says how, the optimizer's type included."""

import os
import shutil
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import distributed

import zero8  # noqa: F401 - registers the types of zero8's optimizers
from examples.gpt.config import load_config
from examples.gpt.model import GPT
from zero8.checkpoint.commands.convert import convert
from zero8.checkpoint.files.manifest import Manifest
from zero8.checkpoint.files.tags import complete_tags
from zero8.ranks.agree import from_rank_0
from zero8.zero.ops import leave_out_shared_memory

UNIVERSAL = "_universal"


class DeepSpeedEngine:
    """See `examples.gpt.engine.engine_class`."""

    load_config = staticmethod(load_config)

    def __init__(self, model: GPT, settings: dict, checkpoint: Path | None = None):
        """Start DeepSpeed, and load the newest complete tag, if asked to.

        One of another number of ranks becomes a universal checkpoint first.
        """
        leave_out_shared_memory()
        self.model = model
        tag = None
        if checkpoint:
            # The engine would do so later; before that ranks have no GPU for a collective.
            get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
            deepspeed.init_distributed()
            tag = from_rank_0(lambda: loadable_tag(checkpoint, distributed.get_world_size()))
            if tag and tag.endswith(UNIVERSAL):
                settings = {**settings, "checkpoint": {"load_universal": True}}
        self.module, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings
        )
        self.optimizer = self.module.basic_optimizer
        self.device = self.module.device
        self.micro_batch_size = self.module.train_micro_batch_size_per_gpu()
        self.accumulation_steps = self.module.gradient_accumulation_steps()
        if tag:
            self.module.load_checkpoint(str(checkpoint), tag=tag)
        self.steps_done = self.module.global_steps

    def step(self, batches: list[torch.Tensor]) -> list[float]:
        """Run one optimizer step on this rank's micro batches and return their losses."""
        losses = []
        for batch in batches:
            loss = self.module(batch)
            self.module.backward(loss)
            self.module.step()
            losses.append(loss.item())
        return losses

    def save(self, folder: Path, steps: int) -> None:
        """Save a checkpoint of so many steps, of zero8's with a manifest; on every rank."""
        self.module.save_checkpoint(str(folder), tag=f"global_step{steps}")


def loadable_tag(folder: Path, world_size: int) -> str | None:
    """Return the newest tag of a folder as so many ranks can load it, None if it has none.

    Tags of fp32 optimizers have no manifest: for them it is the one that `latest` names.
    """
    complete = complete_tags(folder) if folder.is_dir() else []
    complete = [tag.name for tag in complete if not tag.name.endswith(UNIVERSAL)]
    if not complete:
        latest = folder / "latest"
        return latest.read_text().strip() if latest.is_file() else None
    newest = folder / complete[-1]
    if Manifest.read(newest).world_size == world_size:
        return newest.name
    target = newest.with_name(newest.name + UNIVERSAL)
    shutil.rmtree(target, ignore_errors=True)  # of an earlier resume, perhaps not whole
    convert(newest, target, "zero")
    return target.name
