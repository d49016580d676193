# SPDX-License-Identifier: Apache-2.0
"""The optimizers that are measured in turns, by the kind of engine that steps them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

import zero8
from benchmarks.engine.engines import (
    DISK,
    ENGINES,
    FSDP2,
    HYPERS,
    ZERO_STAGES,
    Case,
    DeepSpeedEngine,
    Engine,
    Fsdp2Engine,
)
from zero8.spec.adam import ADAM
from zero8.spec.muon import MUON

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
DEEPSPEED_MUON, OUR_MUON = "DeepSpeed's Muon", "zero8's Muon"
TORCH = "torch's fused AdamW"


def _in_deepspeed(name: str, over: str, optimizer: str, params: dict, bf16: dict) -> Contender:
    return Contender(name, over, partial(DeepSpeedEngine, optimizer, params, bf16))


def _in_fsdp2(name: str, optimizer: Callable[..., Optimizer], **params: Any) -> Contender:
    make = partial(Fsdp2Engine, partial(optimizer, **HYPERS[ADAM.name], **params))
    return Contender(name, TORCH, make)


def _our_muon(name: str, **params: Any) -> Contender:
    params["adjust_lr_fn"] = "original"  # as DeepSpeed's
    return _in_deepspeed(name, DEEPSPEED_MUON, zero8.Muon8bitBlockwise.__name__, params, {})


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
_MUONS = (
    _in_deepspeed(DEEPSPEED_MUON, DEEPSPEED_MUON, "Muon", {}, {}),
    _our_muon(OUR_MUON),
    _our_muon("zero8's Muon, float32", ns_dtype="float32"),
)
CONTENDERS = {
    ADAM.name: dict.fromkeys(ENGINES, _IN_DEEPSPEED) | {DISK: _IN_DEEPSPEED[:3], FSDP2: _IN_FSDP2},
    MUON.name: dict.fromkeys(ZERO_STAGES, _MUONS),
}
"""By algorithm and engine."""
