# SPDX-License-Identifier: Apache-2.0
"""Training under PyTorch's FSDP2, with nothing of DeepSpeed: a TOML config says how."""

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

import zero8
from examples.gpt.config_fsdp2 import FSDP2Settings, Settings, load_config
from examples.gpt.engine import Engine
from examples.gpt.int8_weights import check_sharding, is_int8, separated
from examples.gpt.model import GPT
from zero8 import tagged

# Tags that are kept: the one that is saved next may be cut short.
KEPT = 2
_TAG = "step"


class FSDP2Engine(Engine):
    """See `Engine`."""

    # The fastest of torch's: AdamW in one kernel a step, as ours. Its fused SGD knows no DTensors.
    twins = {
        "AdamW": partial(torch.optim.AdamW, fused=True),
        "SGD": partial(torch.optim.SGD, foreach=True),
    }
    load_config = staticmethod(load_config)

    def __init__(self, model: GPT, settings: Settings, checkpoint: Path | None = None):
        """Join the other ranks, shard the model, and load the newest complete tag, if asked to.

        Raises:
            ValueError: on all ranks, if that tag is damaged.
        """
        self.device = join_ranks()
        self.model = self.module = shard(model, self.device, settings.fsdp2)
        name = settings.optimizer.name
        make = self.twins[name] if name in self.twins else getattr(zero8, name)
        self.optimizer = make(model.named_parameters(), **settings.optimizer.keywords)
        self.micro_batch_size = settings.micro_batch_size
        self.accumulation_steps = settings.accumulation_steps
        self._schedule = LambdaLR(self.optimizer, settings.scheduler.ratio)
        self._gradient_clipping = settings.gradient_clipping
        self.steps_done = 0
        if checkpoint and (tag := tagged.newest(checkpoint)):
            self._load(tag)

    def step(self, batches: list[torch.Tensor]) -> list[float]:
        """See `Engine`."""
        losses = []
        for batch in batches:
            loss = self.module(batch)
            # Each backward adds its mean over the ranks to the shards of the gradients.
            (loss / len(batches)).backward()
            losses.append(loss.item())
        clip_grad_norm_(self.model.parameters(), self._gradient_clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._schedule.step()
        return losses

    def save(self, folder: Path, steps: int) -> None:
        """See `Engine`."""
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

    def synchronize(self) -> None:
        """See `Engine`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


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


def whole(model: GPT, device: torch.device, settings: FSDP2Settings) -> GPT:
    """Return a model with INT8 weights as it is, for one rank that trains without FSDP2.

    FSDP2 on one rank copies the first tensor of a weight alone, and torchao's is made of two.

    Raises:
        ValueError: if the training needs FSDP2.
    """
    if device.type != "cpu" or settings.mixed_precision != "none":
        raise ValueError(
            f"got one rank on {device.type} with mixed_precision = {settings.mixed_precision!r} "
            "for INT8 weights, expected the CPU and 'none', as FSDP2 shards no INT8 weights on one "
            "rank; start two, or set DS_ACCELERATOR=cpu for launch/local.sh and mixed_precision = "
            '"none" in the config'
        )
    return model


def shard(model: GPT, device: torch.device, settings: FSDP2Settings) -> GPT:
    """Shard a model over all ranks, each block by itself, and return it.

    Raises:
        ValueError: for INT8 weights on ranks that cannot have them.
    """
    ranks = distributed.get_world_size()
    has_int8 = any(map(is_int8, model.parameters()))
    if has_int8 and ranks == 1:
        return whole(model, device, settings)
    check_sharding(model, ranks)
    policies = {"mesh": init_device_mesh(device.type, (ranks,))}
    if settings.offload:
        # torchao's weights cannot be pinned.
        pin_memory = device.type == "cuda" and not has_int8
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=pin_memory)
    if settings.mixed_precision == "bf16":
        policies["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **policies)
    return fully_shard(model, **policies)
