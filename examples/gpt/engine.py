# SPDX-License-Identifier: Apache-2.0
"""What the job asks of the framework that trains, and what both frameworks share."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from examples.gpt.model import GPT

BASELINE = "AdamW"
EIGHT_BIT = "Adam8bitBlockwise"

DEEPSPEED = "deepspeed"
FSDP2 = "fsdp2"
# The names of the engines, and the config and the folder for results that each takes by default.
CONFIGS = {DEEPSPEED: "configs/zero2_offload.json", FSDP2: "configs/fsdp2_offload.toml"}
FOLDERS = {DEEPSPEED: "runs/demo", FSDP2: "runs/demo-fsdp2"}


class Engine(ABC):
    """A model in training on all ranks.

    Made of a model, what `load_config` returned, and, to go on from there, the folder of `save`.

    Attributes:
        adamw: the fp32 AdamW of this engine on the CPU.
        model: the model.
        module: what is called in the place of the model; takes windows and returns their loss.
        optimizer: the one that steps, under whatever wraps it.
        device: where the windows of this rank must be.
        micro_batch_size: windows of one rank at a time.
        accumulation_steps: micro batches of a step.
        steps_done: those of the checkpoint it goes on from, 0 without one.
    """

    adamw: Callable[..., torch.optim.Optimizer]
    model: GPT
    module: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    micro_batch_size: int
    accumulation_steps: int
    steps_done: int

    @staticmethod
    @abstractmethod
    def load_config(path: Path, optimizer: str, steps: int) -> object:
        """Return the settings in a config for a run with one optimizer, `steps` steps long.

        Raises:
            ValueError: for a config that is not for this engine, or not for both optimizers.
        """

    @abstractmethod
    def step(self, batches: list[torch.Tensor]) -> list[float]:
        """Run one optimizer step on this rank's micro batches and return their losses."""

    @abstractmethod
    def save(self, folder: Path, steps: int) -> None:
        """Save a checkpoint of so many steps, a tag of a folder; every rank must call it.

        With zero8's optimizer it has a manifest.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for what the device has been asked for."""
