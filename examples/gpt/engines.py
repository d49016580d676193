# SPDX-License-Identifier: Apache-2.0
"""How it is trained: a JSON config is DeepSpeed's, a TOML one is of PyTorch's FSDP2.

Either engine has `module`, `optimizer`, `device`, `micro_batch_size`, `batch_size` (of an optimizer
step), `steps_done`, `step` and `save`.  Nothing of DeepSpeed is imported for FSDP2.
"""

import json
import math
import os
import shutil
import tomllib
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_int8

import zero8
from examples.gpt.model import GPT
from zero8.checkpoint.commands.convert import convert
from zero8.environment.ranks import from_rank_0
from zero8.files import tagged
from zero8.files.manifest import Manifest
from zero8.files.tags import complete_tags
from zero8.op import kernel
from zero8.state.extent import local
from zero8.state.keywords import OWN_KEYS

# zero8's optimizers, each with its fp32 twin, which it is compared with.
TWINS = {
    "Adam8bitBlockwise": "AdamW",
    "Lion8bitBlockwise": "Lion",
    "SGD8bitBlockwise": "SGD",
    "Muon8bitBlockwise": "Muon",
}
# The twins that DeepSpeed compiles on the first start under offload.
BUILDERS = {"AdamW": "CPUAdamBuilder", "Lion": "CPULionBuilder", "Muon": "CPUAdamBuilder"}
# The fastest of torch's: AdamW in one kernel a step, as ours. Its fused SGD knows no DTensors.
FP32 = {
    "AdamW": partial(torch.optim.AdamW, fused=True),
    "SGD": partial(torch.optim.SGD, foreach=True),
}
UNIVERSAL = "_universal"


def load_config(path: Path, optimizer: str, codec: str | None = None) -> dict:
    """Return the config at `path`, in the words of DeepSpeed's, with its optimizer or the twin."""
    text, is_of_fsdp2 = path.read_text(), path.suffix == ".toml"
    config = tomllib.loads(text) if is_of_fsdp2 else json.loads(text)
    section = config.get("optimizer", {})
    given = section.pop("type", None)
    params = section if is_of_fsdp2 else section.get("params", {})
    ours = next(ours for ours, twin in TWINS.items() if optimizer in (ours, twin))
    if given != ours:
        raise ValueError(f"got optimizer type {given!r} in {str(path)!r}, expected {ours!r}")
    if optimizer != ours:
        params = {key: value for key, value in params.items() if key not in OWN_KEYS}
    elif codec is not None:
        params = {**params, "codec": codec}
    return {**config, "optimizer": {"type": optimizer, "params": params}}


class DeepSpeedEngine:
    """Training under DeepSpeed."""

    def __init__(self, model: GPT, config: dict, steps: int, checkpoint: Path | None = None):
        """Start DeepSpeed, and load the newest complete tag, if asked to."""
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        # An all_reduce of DeepSpeed's, which only its own launcher has it call.
        deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
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

    def step(self, batch: Tensor) -> list[float]:
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


def offload_device(config: dict) -> str:
    """Return where a config of DeepSpeed's keeps the optimizer: "cpu", "nvme", or "none"."""
    return config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")


def completed(config: dict, steps: int) -> dict:
    """Return a config with the schedule of so many steps, and what DeepSpeed wants for a twin."""
    params, others = dict(config["optimizer"]["params"]), {}
    match config["optimizer"]["type"]:
        case "AdamW" if torch.cuda.is_available() and offload_device(config) == "none":
            # DeepSpeed's FusedAdam would need the CUDA toolkit that torch was built with.
            params["torch_adam"] = True
        case "SGD":  # torch's, which DeepSpeed has not tested under ZeRO
            params["fused"] = others["zero_allow_untested_optimizer"] = True
    scheduler = config.get("scheduler", {})
    if "total_num_steps" in (schedule := scheduler.get("params", {})):
        others["scheduler"] = {**scheduler, "params": {**schedule, "total_num_steps": steps}}
    return {**config, **others, "optimizer": {**config["optimizer"], "params": params}}


def build(config: dict) -> None:
    """Build the ops of a run under DeepSpeed before its ranks do, and print where they are."""
    from deepspeed.accelerator import get_accelerator

    kind, device = config["optimizer"]["type"], offload_device(config)
    if kind in TWINS:
        kernel.module()
    names = [BUILDERS[kind]] if kind in BUILDERS and device != "none" else []
    names += ["AsyncIOBuilder"] if device == "nvme" else []
    for name in names:
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
    copy = newest.with_name(newest.name + UNIVERSAL)
    shutil.rmtree(copy, ignore_errors=True)  # of an earlier resume, perhaps not whole
    convert(newest, copy, "zero")
    return copy.name


def lr_ratio(step: int, warmup_steps: int, min_ratio: float, total_steps: int) -> float:
    """Return the part of the learning rate that DeepSpeed's WarmupCosineLR has at a step."""
    done = max(0, step - 1)  # two steps have 0
    if done < warmup_steps:
        return done / warmup_steps
    progress = min(1.0, (done - warmup_steps + 1) / max(1, total_steps - warmup_steps))
    return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2


class FSDP2Engine:
    """Training under FSDP2."""

    def __init__(self, model: GPT, config: dict, steps: int, checkpoint: Path | None = None):
        """Join the other ranks, shard the model, and load the newest complete tag, if asked to."""
        self.device = join_ranks()
        self.module = shard(model, self.device, **config["fsdp2"])
        make = FP32.get(config["optimizer"]["type"]) or getattr(zero8, config["optimizer"]["type"])
        self.optimizer = make(model.named_parameters(), **config["optimizer"]["params"])
        self.micro_batch_size = config["micro_batch_size"]
        self.batch_size = self.micro_batch_size * config["accumulation_steps"]
        ratio = partial(lr_ratio, **config["scheduler"], total_steps=steps)
        self._schedule = LambdaLR(self.optimizer, ratio)
        self._gradient_clipping = config["gradient_clipping"]
        self.steps_done = 0
        if checkpoint and (tag := tagged.newest(checkpoint)):
            self._load(tag)

    def step(self, batch: Tensor) -> list[float]:
        """Run one optimizer step on this rank's windows; return the losses of micro batches."""
        losses = []
        for part in batch.split(self.micro_batch_size):
            loss = self.module(part)
            # Each backward adds its mean over the ranks to the shards of the gradients.
            (loss * len(part) / len(batch)).backward()
            losses.append(loss.item())
        clip_grad_norm_(self.module.parameters(), self._gradient_clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._schedule.step()
        return losses

    def save(self, folder: Path, steps: int) -> None:
        """Save a checkpoint of so many steps, with a manifest; every rank must call it."""
        with tagged.saving(folder, f"step{steps}", keep=2) as tag:
            model, optimizer = get_state_dict(self.module, self.optimizer)
            dcp.save({"model": separated(model), "optimizer": optimizer}, checkpoint_id=tag)

    def _load(self, tag: Path) -> None:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        dcp.load({"model": separated(model), "optimizer": optimizer}, checkpoint_id=tag)
        set_state_dict(
            self.module, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        self.steps_done = int(tag.name.removeprefix("step"))
        counts = {"last_epoch": self.steps_done, "_step_count": self.steps_done + 1}
        self._schedule.load_state_dict({**self._schedule.state_dict(), **counts})


def join_ranks() -> torch.device:
    """Start torch.distributed, unless the process has, and return the device of this rank."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # gloo for the norm of offloaded gradients
    else:
        device, backend = torch.device("cpu"), "gloo"
    if not distributed.is_initialized():
        distributed.init_process_group(backend)
    return device


def shard(model: GPT, device: torch.device, offload: bool, mixed_precision: str) -> GPT:
    """Shard a model over all ranks, each block by itself, and return it."""
    ranks = distributed.get_world_size()
    int8_rows = [len(p) for p in model.parameters() if is_int8(p)]
    # FSDP2 on one rank copies the first tensor of a weight alone, and torchao's is made of two.
    if int8_rows and ranks == 1 and device.type == "cpu" and mixed_precision == "none":
        return model
    if int8_rows and (ranks == 1 or any(rows % ranks for rows in int8_rows)):
        raise ValueError(
            f"got {ranks} rank(s), expected a divisor above 1 of {sorted(set(int8_rows))}, the "
            'rows of INT8 weights (RANKS=), or 1 on the CPU with mixed_precision = "none"'
        )
    policies = {"mesh": init_device_mesh(device.type, (ranks,))}
    if offload:
        # torchao's weights cannot be pinned.
        pin_memory = device.type == "cuda" and not int8_rows
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=pin_memory)
    if mixed_precision == "bf16":
        policies["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **policies)
    return fully_shard(model, **policies)


def make_int8(model: nn.Module) -> None:
    """Make the weights of all linear layers torchao's INT8; others stay as they are."""
    from torchao import quantize_
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training

    quantize_(model, int8_weight_only_quantized_training())


def separated(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with each INT8 weight as its two tensors, which share its memory."""
    # torch.distributed.checkpoint asks each tensor whether its memory is pinned, and torchao's
    # class does not implement that.
    parts: dict[str, Tensor] = {}
    for name, value in state.items():
        if not is_int8(here := local(value)):
            parts[name] = value
            continue
        for part in here.__tensor_flatten__()[0]:
            tensor = getattr(here, part)
            if isinstance(value, DTensor):
                tensor = DTensor.from_local(tensor, value.device_mesh, value.placements)
            parts[f"{name}.{part}"] = tensor
    return parts


ENGINES = {".json": DeepSpeedEngine, ".toml": FSDP2Engine}  # by the endings of configs
