# SPDX-License-Identifier: Apache-2.0
"""The engines that are measured in turns, and how DeepSpeed is asked for them."""

import os
import socket
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zero8

SIDE = 2048
HYPER = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
BF16_MASTERS = {"bf16_master_weights_and_grads": True}
OURS = zero8.Adam8bitBlockwise.__name__


class Contender(NamedTuple):
    """An optimizer in an engine.

    Attributes:
        name: the name of its row.
        masters: the master weights, which only rows of the same group share.
        optimizer: the type in DeepSpeed's config.
        params: its parameters there, besides `HYPER`.
        bf16: more of the section "bf16".
    """

    name: str
    masters: str
    optimizer: str
    params: dict[str, Any] = {}
    bf16: dict[str, Any] = {}

    def config(self, stage: int, clipping: float) -> dict[str, Any]:
        """Return DeepSpeed's config of this engine."""
        offload = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": clipping,
            "bf16": {"enabled": True, **self.bf16},
            "optimizer": {"type": self.optimizer, "params": {**HYPER, **self.params}},
            "zero_optimization": {"stage": stage, "offload_optimizer": offload},
            "steps_per_print": 10**9,
        }


DEEPSPEED, DEEPSPEED_BF16 = "DeepSpeed, fp32 masters", "DeepSpeed, bf16 masters and states"
CONTENDERS = (
    Contender(DEEPSPEED, "fp32", "AdamW"),
    Contender("zero8, fp32 masters", "fp32", OURS),
    Contender("zero8, 24-bit masters", "24-bit", OURS, {"weight_correction_bits": 8}, BF16_MASTERS),
    Contender(DEEPSPEED_BF16, "bf16", "AdamW", {}, BF16_MASTERS | {"bf16_optimizer_states": True}),
    Contender("zero8, bf16 masters", "bf16", OURS, {}, BF16_MASTERS),
)


class Matrices(nn.Module):
    """Square matrices whose gradients are large enough for clipping; the forward is short."""

    def __init__(self, numel: int):
        """Make `numel` parameters."""
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrices = nn.ParameterList(
            nn.Parameter(torch.randn(SIDE, SIDE, generator=generator) / SIDE**0.5)
            for _ in range(numel // SIDE**2)
        )

    def forward(self) -> Tensor:
        """Return half the sum of squares."""
        return sum((p.float().square().sum() for p in self.matrices), torch.zeros(())) / 2


def join_ranks() -> None:
    """Take a launcher's variables, or be the only rank."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def engine(contender: Contender, stage: int, clipping: float, numel: int) -> Any:
    """Return a new engine."""
    import deepspeed

    model = Matrices(numel)
    return deepspeed.initialize(model=model, config=contender.config(stage, clipping))[0]
