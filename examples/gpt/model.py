# SPDX-License-Identifier: Apache-2.0
"""A small byte-level GPT: pre-LN blocks, learned positions, tied input and output embeddings."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; `context` is the number of bytes that it sees."""

    context: int = 128
    width: int = 256
    layers: int = 2
    heads: int = 4


MODELS = {
    "demo": GPTConfig(),
    "1b": GPTConfig(context=1024, width=2048, layers=24, heads=16),
    "3b": GPTConfig(context=1024, width=2560, layers=36, heads=20),
}
"""The sizes that --model knows: 1.7 M, 1.2 and 2.8 G parameters."""


class Block(nn.Module):
    """One pre-LN transformer block on [batch, length, width]."""

    def __init__(self, config: GPTConfig):
        """Make the layers."""
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Return causal self-attention of x, [batch, length, width]."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, [batch, length, width]."""
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder over bytes whose forward returns the loss, as DeepSpeed's examples do."""

    def __init__(self, config: GPTConfig):
        """Make the layers."""
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(VOCABULARY, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.apply(self._initialize)
        # GPT-2: the 2 * layers residual branches together add unit-order variance.
        for block in self.blocks:
            for layer in (block.projection, block.mlp[-1]):
                nn.init.normal_(layer.weight, std=0.02 * (2 * config.layers) ** -0.5)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy, nats per byte, on int64 windows [batch, length + 1]."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.token_embedding(inputs) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token_embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
