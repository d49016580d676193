# SPDX-License-Identifier: Apache-2.0
"""Training under DeepSpeed: a JSON config says how, the optimizer's type included."""

import os
import shutil
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from torch import distributed

import zero8  # noqa: F401 - registers the types of zero8's optimizers
from examples.gpt.model import GPT
from zero8.checkpoint.commands.convert import convert
from zero8.environment.agree import from_rank_0
from zero8.files.manifest import Manifest
from zero8.files.tags import complete_tags
from zero8.op import kernel
from zero8.spec.algorithms import ALGORITHMS

UNIVERSAL = "_universal"
# By the types of DeepSpeed's optimizers that compile on the first start under offload.
BUILDERS = {"AdamW": "CPUAdamBuilder", "Lion": "CPULionBuilder", "Muon": "CPUAdamBuilder"}


class DeepSpeedEngine:
    """See `examples.gpt.run.engine_class`."""

    def __init__(self, model: GPT, config: dict, steps: int, checkpoint: Path | None = None):
        """Start DeepSpeed, and load the newest complete tag, if asked to."""
        # An all_reduce of DeepSpeed's, which only its own launcher has it call.
        deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
        self.model = model
        tag = None
        if checkpoint:
            # The engine would do so later; before that ranks have no GPU for a collective.
            get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
            deepspeed.init_distributed()
            tag = from_rank_0(lambda: loadable_tag(checkpoint, distributed.get_world_size()))
            if tag and tag.endswith(UNIVERSAL):
                config = {**config, "checkpoint": {"load_universal": True}}
        self.module, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=completed(config, steps)
        )
        self.optimizer = self.module.basic_optimizer
        self.device = self.module.device
        self.micro_batch_size = self.module.train_micro_batch_size_per_gpu()
        self.batch_size = self.micro_batch_size * self.module.gradient_accumulation_steps()
        if tag:
            self.module.load_checkpoint(str(checkpoint), tag=tag)
        self.steps_done = self.module.global_steps

    def step(self, batch: torch.Tensor) -> list[float]:
        """Run one optimizer step on this rank's windows; return the losses of micro batches."""
        losses = []
        for part in batch.split(self.micro_batch_size):
            loss = self.module(part)
            self.module.backward(loss)
            self.module.step()
            losses.append(loss.item())
        return losses

    def save(self, folder: Path, steps: int) -> None:
        """Save a checkpoint of so many steps, of zero8's with a manifest; on every rank."""
        self.module.save_checkpoint(str(folder), tag=f"global_step{steps}")


def completed(config: dict, steps: int) -> dict:
    """Return a config with the schedule of so many steps, and what DeepSpeed wants for a twin."""
    params, others = dict(config["optimizer"]["params"]), {}
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {})
    is_offloaded = offload.get("device", "none") != "none"
    match config["optimizer"]["type"]:
        case "AdamW" if not is_offloaded and get_accelerator().device_name() == "cuda":
            # DeepSpeed's FusedAdam would need the CUDA toolkit that torch was built with.
            params["torch_adam"] = True
        case "SGD":  # torch's, which DeepSpeed has not tested under ZeRO
            params["fused"] = others["zero_allow_untested_optimizer"] = True
    scheduler = config.get("scheduler", {})
    if "total_num_steps" in (schedule := scheduler.get("params", {})):
        others["scheduler"] = {**scheduler, "params": {**schedule, "total_num_steps": steps}}
    return {**config, **others, "optimizer": {**config["optimizer"], "params": params}}


def build(config: dict) -> None:
    """Build the ops of a run before its ranks do, and print where they are."""
    optimizer = completed(config, 0)["optimizer"]
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {})
    device = offload.get("device", "none")
    if optimizer["type"] in {algorithm.class_name for algorithm in ALGORITHMS}:
        kernel.module()
    names = [BUILDERS[optimizer["type"]]] if optimizer["type"] in BUILDERS else []
    names = names if device != "none" else []
    for name in names + ["AsyncIOBuilder"] * (device == "nvme"):
        builder = get_accelerator().create_op_builder(name)
        print(f"op {builder.name}: {builder.load(verbose=False).__file__}", flush=True)


def loadable_tag(folder: Path, world_size: int) -> str | None:
    """Return the newest tag of a folder as so many ranks can load it, None if it has none."""
    complete = complete_tags(folder) if folder.is_dir() else []
    complete = [tag.name for tag in complete if not tag.name.endswith(UNIVERSAL)]
    if not complete:  # those of fp32 optimizers have no manifest
        latest = folder / "latest"
        return latest.read_text().strip() if latest.is_file() else None
    newest = folder / complete[-1]
    if Manifest.read(newest).world_size == world_size:
        return newest.name
    return loadable(newest).name


def loadable(tag: Path) -> Path:
    """Return a copy of a tag that any number of ranks can load."""
    target = tag.with_name(tag.name + UNIVERSAL)
    shutil.rmtree(target, ignore_errors=True)  # of an earlier resume, perhaps not whole
    convert(tag, target, "zero")
    return target
