# SPDX-License-Identifier: Apache-2.0
"""What is trained: a small byte-level GPT (pre-LN, learned positions, tied embeddings), on text."""

import random
import sysconfig
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import NamedTuple

import numpy as np
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, [batch, length, width], of causal self-attention and MLP."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x))
        qkv = qkv.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
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


# Of text: which files, the train/validation split, and batches.
VALIDATION_SHARE = 0.05
# Fixed, so that the validation text does not move with the training seed.
SPLIT_SEED = 0
# Left out of the default text: installed packages, tests, and two folders of generated tables
# (near-copies of one another, which would put training text into the validation set).
EXCLUDED = set("site-packages dist-packages test tests idle_test encodings pydoc_data".split())


class Text(NamedTuple):
    """A corpus, 1-D uint8 tensors with an element per byte, and what a record says of it."""

    train: torch.Tensor
    validation: torch.Tensor
    about: dict


def load_text(data: str | None) -> Text:
    """Read a corpus, a folder or file, by default the standard library's sources, and split it."""
    root = Path(sysconfig.get_path("stdlib") if data is None else data)
    texts = [root.read_bytes()] if root.is_file() else texts_in(root, is_stdlib=data is None)
    if root.is_file():
        cut = round((1 - VALIDATION_SHARE) * len(texts[0]))
        parts = texts[0][:cut], texts[0][cut:]
    elif len(texts) < 2:
        raise ValueError(
            f"found {len(texts)} text files in {str(root)!r}, expected at least 2, to split them "
            "into train and validation; pass --data a folder with more, or one file"
        )
    else:
        count = max(1, round(VALIDATION_SHARE * len(texts)))
        held = random.Random(SPLIT_SEED).sample(range(len(texts)), count)
        others = (text for number, text in enumerate(texts) if number not in held)
        parts = b"".join(others), b"".join(texts[number] for number in sorted(held))
    train, validation = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    sizes = {"train_bytes": len(train), "validation_bytes": len(validation)}
    return Text(train, validation, {"path": str(root), "files": len(texts), **sizes})


def texts_in(root: Path, is_stdlib: bool) -> list[bytes]:
    """Return the text files in a folder, without hidden ones, or a standard library's sources."""
    pattern, left_out = ("**/*.py", EXCLUDED) if is_stdlib else ("**/*", set())
    found = map(Path, glob(pattern, root_dir=root, recursive=True))
    paths = sorted(root / path for path in found if not left_out & set(path.parts))
    texts = [path.read_bytes() for path in paths if path.is_file()]
    return [text for text in texts if is_stdlib or (text and b"\0" not in text)]


def windows(text: torch.Tensor, starts: list[int], context: int) -> torch.Tensor:
    """Return int64 windows of shape [len(starts), context + 1]: inputs and, one later, targets."""
    return torch.stack([text[start : start + context + 1] for start in starts]).long()


def train_batch(
    text: torch.Tensor, size: int, context: int, *, seed: int, step: int, rank: int
) -> torch.Tensor:
    """Return random windows, int64 [size, context + 1], fixed by (seed, step, rank)."""
    if text.numel() < context + 1:
        raise ValueError(f"got {text.numel()} bytes of text, expected at least {context + 1}")
    generator = np.random.default_rng((seed, step, rank))
    starts = generator.integers(0, text.numel() - context, size=size)
    return windows(text, starts.tolist(), context)


def validation_windows(text: torch.Tensor, count: int, context: int) -> torch.Tensor:
    """Return `count` evenly spaced windows, or as many as lie side by side, but at least one."""
    count = max(1, min(count, text.numel() // (context + 1)))
    starts = torch.linspace(0, text.numel() - context - 1, count, dtype=torch.float64)
    return windows(text, starts.long().tolist(), context)
