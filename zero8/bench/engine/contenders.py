# SPDX-License-Identifier: Apache-2.0
"""The optimizers that are measured in turns, by the kind of engine that steps them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

import zero8
from zero8.bench.engine.engines import (
    ENGINES,
    FSDP2,
    HYPER,
    Case,
    DeepSpeedEngine,
    Engine,
    Fsdp2Engine,
)

BF16_MASTERS = {"bf16_master_weights_and_grads": True}
OURS = zero8.Adam8bitBlockwise.__name__


class Contender(NamedTuple):
    """An optimizer in an engine.

    Attributes:
        name: the name of its row.
        over: the name of the row that it is compared with.
        make: makes a new engine.
    """

    name: str
    over: str
    make: Callable[[Case], Engine]


DEEPSPEED, DEEPSPEED_BF16 = "DeepSpeed, fp32 masters", "DeepSpeed, bf16 masters and states"
TORCH = "torch's fused AdamW"


def _in_deepspeed(name: str, over: str, optimizer: str, params: dict, bf16: dict) -> Contender:
    return Contender(name, over, partial(DeepSpeedEngine, optimizer, params, bf16))


def _in_fsdp2(name: str, optimizer: Callable[..., Optimizer], **params: Any) -> Contender:
    return Contender(name, TORCH, partial(Fsdp2Engine, partial(optimizer, **HYPER, **params)))


_CORRECTED = {"weight_correction_bits": 8}
_BF16_STATES = BF16_MASTERS | {"bf16_optimizer_states": True}
_IN_DEEPSPEED = (
    _in_deepspeed(DEEPSPEED, DEEPSPEED, "AdamW", {}, {}),
    _in_deepspeed("zero8, fp32 masters", DEEPSPEED, OURS, {}, {}),
    _in_deepspeed("zero8, 24-bit masters", DEEPSPEED, OURS, _CORRECTED, BF16_MASTERS),
    _in_deepspeed(DEEPSPEED_BF16, DEEPSPEED_BF16, "AdamW", {}, _BF16_STATES),
    _in_deepspeed("zero8, bf16 masters", DEEPSPEED_BF16, OURS, {}, BF16_MASTERS),
)
_IN_FSDP2 = (
    _in_fsdp2(TORCH, torch.optim.AdamW, fused=True),
    _in_fsdp2("zero8", zero8.Adam8bitBlockwise),
)
CONTENDERS = {name: _IN_FSDP2 if name == FSDP2 else _IN_DEEPSPEED for name in ENGINES}
"""By engine."""
