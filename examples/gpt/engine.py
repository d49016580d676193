# SPDX-License-Identifier: Apache-2.0
"""What the job asks of the framework that trains, and what both frameworks share."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from examples.gpt.model import GPT

# zero8's optimizers, each with its fp32 twin, which it is compared with.
TWINS = {
    "Adam8bitBlockwise": "AdamW",
    "Lion8bitBlockwise": "Lion",
    "SGD8bitBlockwise": "SGD",
    "Muon8bitBlockwise": "Muon",
}

DEEPSPEED = "deepspeed"
FSDP2 = "fsdp2"
FLOAT32 = "float32"
INT8 = "int8"
# The formats of the weights of the linear layers; all other weights are float32.
WEIGHTS = (FLOAT32, INT8)
# Of each engine: a config and a folder for results for each optimizer whose twin it has.
DEFAULTS = {
    DEEPSPEED: {
        "Adam8bitBlockwise": ("configs/zero2_offload.json", "runs/demo"),
        "Lion8bitBlockwise": ("configs/zero2_offload_lion.json", "runs/demo-lion"),
        "SGD8bitBlockwise": ("configs/zero2_offload_sgd.json", "runs/demo-sgd"),
        "Muon8bitBlockwise": ("configs/zero2_offload_muon.json", "runs/demo-muon"),
    },
    FSDP2: {
        "Adam8bitBlockwise": ("configs/fsdp2_offload.toml", "runs/demo-fsdp2"),
        "SGD8bitBlockwise": ("configs/fsdp2_offload_sgd.toml", "runs/demo-fsdp2-sgd"),
    },
}


def eight_bit_of(optimizer: str) -> str:
    """Return zero8's optimizer of a pair that has an optimizer of this name."""
    return next(ours for ours, twin in TWINS.items() if optimizer in (ours, twin))


def defaults(engine: str, optimizer: str) -> tuple[str, str]:
    """Return the config and the folder for results of a run with one optimizer of a pair.

    Raises:
        ValueError: if the engine has no twin of zero8's optimizer.
    """
    if (ours := eight_bit_of(optimizer)) not in DEFAULTS[engine]:
        pairs = [name for ours in DEFAULTS[engine] for name in (TWINS[ours], ours)]
        raise ValueError(
            f"got optimizer {optimizer} for the engine {engine}, expected one of {pairs}, as it "
            f"has no {TWINS[ours]}; run it with the engine {DEEPSPEED}"
        )
    return DEFAULTS[engine][ours]


def check_weights(weights: str, engine: str, optimizer: str) -> None:
    """Check that an optimizer of an engine steps weights of a format.

    Raises:
        ValueError: if it does not.
    """
    if weights == INT8 and engine == DEEPSPEED:
        raise ValueError(
            f"got weights {INT8} for the engine {DEEPSPEED}, expected {FLOAT32}, as ZeRO flattens "
            f"weights, and INT8 weights have a scale per row; run it with the engine {FSDP2}"
        )
    if weights == INT8 and optimizer not in TWINS:
        raise ValueError(
            f"got weights {INT8} for the optimizer {optimizer}, expected {FLOAT32}, as it is the "
            "fp32 run to compare with; run it without --weights"
        )


class Engine(ABC):
    """A model in training on all ranks.

    Made of a model, what `load_config` returned, and, to go on from there, the folder of `save`.

    Attributes:
        twins: the fp32 optimizers of this engine on the CPU, by name.
        model: the model.
        module: what is called in the place of the model; takes windows and returns their loss.
        optimizer: the one that steps, under whatever wraps it.
        has_whole_step: whether its `step()` is all of the step; DeepSpeed's Muon is orthogonalized
            by what wraps it.
        device: where the windows of this rank must be.
        micro_batch_size: windows of one rank at a time.
        accumulation_steps: micro batches of a step.
        steps_done: those of the checkpoint it goes on from, 0 without one.
    """

    twins: dict[str, Callable[..., torch.optim.Optimizer]]
    model: GPT
    module: nn.Module
    optimizer: torch.optim.Optimizer
    has_whole_step: bool = True
    device: torch.device
    micro_batch_size: int
    accumulation_steps: int
    steps_done: int

    @staticmethod
    @abstractmethod
    def load_config(path: Path, optimizer: str, steps: int, codec: str | None = None) -> object:
        """Return the settings in a config for a run with one optimizer, `steps` steps long.

        The codec is that of zero8's states in the run; None for the config's.

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
