# SPDX-License-Identifier: Apache-2.0
"""Training under PyTorch's FSDP2, with nothing of DeepSpeed: a TOML config says how."""

import math
import os
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
from zero8.files import tagged
from zero8.state.extent import local

# Tags that are kept: the one that is saved next may be cut short.
KEPT = 2
_TAG = "step"
# The fastest of torch's: AdamW in one kernel a step, as ours. Its fused SGD knows no DTensors.
FP32 = {
    "AdamW": partial(torch.optim.AdamW, fused=True),
    "SGD": partial(torch.optim.SGD, foreach=True),
}


def lr_ratio(step: int, warmup_steps: int, min_ratio: float, total_steps: int) -> float:
    """Return the part of the learning rate that DeepSpeed's WarmupCosineLR has at a step."""
    done = max(0, step - 1)  # two steps have 0
    if done < warmup_steps:
        return done / warmup_steps
    progress = min(1.0, (done - warmup_steps + 1) / max(1, total_steps - warmup_steps))
    return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2


class FSDP2Engine:
    """See `examples.gpt.run.engine_class`."""

    def __init__(self, model: GPT, config: dict, steps: int, checkpoint: Path | None = None):
        """Join the other ranks, shard the model, and load the newest complete tag, if asked to."""
        self.device = join_ranks()
        self.model = self.module = shard(model, self.device, **config["fsdp2"])
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
        clip_grad_norm_(self.model.parameters(), self._gradient_clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._schedule.step()
        return losses

    def save(self, folder: Path, steps: int) -> None:
        """Save a checkpoint of so many steps, with a manifest; every rank must call it."""
        with tagged.saving(folder, f"{_TAG}{steps}", KEPT) as tag:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            dcp.save({"model": separated(model), "optimizer": optimizer}, checkpoint_id=tag)

    def _load(self, tag: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": separated(model), "optimizer": optimizer}, checkpoint_id=tag)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        self.steps_done = int(tag.name.removeprefix(_TAG))
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
            f"got {ranks} rank(s) for INT8 weights of {sorted(set(int8_rows))} rows, expected a "
            "number above 1 that divides them (RANKS of launch/local.sh), or 1 on the CPU with "
            'mixed_precision = "none"'
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


def components(tensor: Tensor) -> dict[str, Tensor]:
    """Return by name the tensors that an INT8 weight is made of: rows, and a scale for each."""
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def separated(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with each INT8 weight as its two tensors, which share its memory."""
    # torch.distributed.checkpoint asks each tensor whether its memory is pinned, and torchao's
    # class does not implement that.
    parts: dict[str, Tensor] = {}
    for name, value in state.items():
        if not is_int8(here := local(value)):
            parts[name] = value
            continue
        for part, tensor in components(here).items():
            if isinstance(value, DTensor):
                shape = torch.Size((value.shape[0], *tensor.shape[1:]))
                layout = {"shape": shape, "stride": tensor.stride()}
                tensor = DTensor.from_local(tensor, value.device_mesh, value.placements, **layout)
            parts[f"{name}.{part}"] = tensor
    return parts
