# SPDX-License-Identifier: Apache-2.0
"""A task that trains adapters of low rank (LoRA) on a model whose own weights are frozen."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fidelity.text import TextTask
from examples.gpt.model import Block

# The windows that the model has seen before are others than those that adapters are trained on.
PRETRAINING_SEED = 1000
PRETRAINING_LR = 1e-3
PRUNED_MATRIX = "blocks.0.mlp.0.lora_B"
PRUNED_EVERY = 16


class Adapted(nn.Module):
    """A frozen linear layer and its adapter, W x + B A x: A has long rows, B narrow ones."""

    def __init__(self, linear: nn.Linear, rank: int):
        """Make the adapter, which changes nothing at first: B is zero."""
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output with what the adapter adds."""
        return self.linear(x) + F.linear(F.linear(x, self.lora_A), self.lora_B)


def adapt(block: Block, rank: int) -> None:
    """Put an adapter on every linear layer of a block."""
    block.qkv = Adapted(block.qkv, rank)
    block.projection = Adapted(block.projection, rank)
    block.mlp[0], block.mlp[2] = Adapted(block.mlp[0], rank), Adapted(block.mlp[2], rank)


@dataclass(frozen=True)
class LoraTask:
    """Predict the next byte with adapters; see `benchmarks.fidelity.training.Task`.

    Attributes:
        text: the model, and its data.
        rank: of the adapters.
        pretraining: steps of fp32 AdamW that the model takes before it is frozen.
    """

    text: TextTask = TextTask()
    rank: int = 16
    pretraining: int = 200

    def make_model(self) -> nn.Module:
        """Return the GPT, trained for a while, with an adapter on each of its linear layers."""
        model = self.text.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_LR, fused=True)
        for step in range(self.pretraining):
            optimizer.zero_grad()
            model(*self.text.batch(PRETRAINING_SEED, step)).backward()
            optimizer.step()
        model.zero_grad()
        model.requires_grad_(False)
        for block in model.blocks:
            adapt(block, self.rank)
        return model

    def batch(self, seed: int, step: int) -> tuple[Tensor]:
        """Return random windows of the training text."""
        return self.text.batch(seed, step)

    def mark_untrained(self, marks: dict[str, Tensor]) -> None:
        """Mark every 16th row of one B, which is treated as pruned."""
        marks[PRUNED_MATRIX][::PRUNED_EVERY] = True

    def validation_loss(self, model: nn.Module) -> float:
        """Return the mean loss of the model with its adapters, nats per byte."""
        return self.text.validation_loss(model)
