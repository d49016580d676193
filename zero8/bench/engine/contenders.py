# SPDX-License-Identifier: Apache-2.0
"""The optimizers that are measured in turns, by the kind of engine that steps them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

import zero8
from zero8.algorithms.adam import ADAM
from zero8.algorithms.muon import MUON
from zero8.bench.engine.engines import (
    ENGINES,
    FSDP2,
    HYPERS,
    ZERO_STAGES,
    Case,
    DeepSpeedEngine,
    Engine,
    Fsdp2Engine,
)
from zero8.bench.engine.traffic import Entry, our_states

BF16_MASTERS = {"bf16_master_weights_and_grads": True}
OURS = zero8.Adam8bitBlockwise.__name__


class Contender(NamedTuple):
    """An optimizer in an engine.

    Attributes:
        name: the name of its row.
        over: the name of the row that it is compared with.
        entry: what its step reads and writes; None where that is not the time's measure.
        make: makes a new engine.
    """

    name: str
    over: str
    entry: Entry | None
    make: Callable[[Case], Engine]


DEEPSPEED, DEEPSPEED_BF16 = "DeepSpeed, fp32 masters", "DeepSpeed, bf16 masters and states"
DEEPSPEED_MUON, OUR_MUON = "DeepSpeed's Muon", "zero8's Muon"
TORCH = "torch's fused AdamW"


def _in_deepspeed(
    name: str, over: str, entry: Entry | None, optimizer: str, params: dict, bf16: dict
) -> Contender:
    return Contender(name, over, entry, partial(DeepSpeedEngine, optimizer, params, bf16))


def _in_fsdp2(
    name: str, entry: Entry, optimizer: Callable[..., Optimizer], **params: Any
) -> Contender:
    make = partial(Fsdp2Engine, partial(optimizer, **HYPERS[ADAM.name], **params))
    return Contender(name, TORCH, entry, make)


def _our_muon(name: str, **params: Any) -> Contender:
    params["adjust_lr_fn"] = "original"  # as DeepSpeed's
    return _in_deepspeed(name, DEEPSPEED_MUON, None, zero8.Muon8bitBlockwise.__name__, params, {})


_CORRECTED = {"weight_correction_bits": 8}
_BF16_STATES = BF16_MASTERS | {"bf16_optimizer_states": True}
_FP32, _BF16 = Entry(4, 8, 4), Entry(2, 4, 2)
_OUR_FP32 = Entry(4, our_states(), 2, is_ours=True)
_OUR_24_BITS = Entry(2, our_states() + 1, 2, is_ours=True)
_OUR_BF16 = Entry(2, our_states(), 2, is_ours=True)
_IN_DEEPSPEED = (
    _in_deepspeed(DEEPSPEED, DEEPSPEED, _FP32, "AdamW", {}, {}),
    _in_deepspeed("zero8, fp32 masters", DEEPSPEED, _OUR_FP32, OURS, {}, {}),
    _in_deepspeed("zero8, 24-bit masters", DEEPSPEED, _OUR_24_BITS, OURS, _CORRECTED, BF16_MASTERS),
    _in_deepspeed(DEEPSPEED_BF16, DEEPSPEED_BF16, _BF16, "AdamW", {}, _BF16_STATES),
    _in_deepspeed("zero8, bf16 masters", DEEPSPEED_BF16, _OUR_BF16, OURS, {}, BF16_MASTERS),
)
_IN_FSDP2 = (
    _in_fsdp2(TORCH, _FP32, torch.optim.AdamW, fused=True),
    _in_fsdp2("zero8", _OUR_FP32._replace(grad=4), zero8.Adam8bitBlockwise),
)
_MUONS = (
    _in_deepspeed(DEEPSPEED_MUON, DEEPSPEED_MUON, None, "Muon", {}, {}),
    _our_muon(OUR_MUON),
    _our_muon("zero8's Muon, float32", ns_dtype="float32"),
)
CONTENDERS = {
    ADAM.name: {name: _IN_FSDP2 if name == FSDP2 else _IN_DEEPSPEED for name in ENGINES},
    MUON.name: dict.fromkeys(ZERO_STAGES, _MUONS),
}
"""By algorithm and engine."""
