# SPDX-License-Identifier: Apache-2.0
"""What is compared, by name: zero8's codecs, other packages' states, and kept weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero8
from benchmarks.fidelity.coded import Named
from benchmarks.fidelity.rivals import ADAM_RIVALS, MUON_RIVALS
from benchmarks.fidelity.training import Setting
from benchmarks.states import state_bytes
from benchmarks.step import peers
from zero8.bench import reason_of
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS

Make = Callable[..., Optimizer]

CLASSES: dict[str, Make] = {
    "Adam": zero8.Adam8bitBlockwise,
    "Lion": zero8.Lion8bitBlockwise,
    "SGD": zero8.SGD8bitBlockwise,
    "AdEMAMix": zero8.AdEMAMix8bitBlockwise,
    "Muon": zero8.Muon8bitBlockwise,
}
"""zero8's optimizers by algorithm."""
FP32 = "fp32"
FP32_WEIGHTS = "float32 weights"
CONTROL = "fp32 of zero8"
FP32_STATES = {"fp32_params": ["*"]}


def as_float32(name: str, weight: Tensor) -> nn.Parameter:
    """Return a float32 parameter with the values of a weight."""
    return nn.Parameter(weight.detach().clone())


def as_bfloat16(name: str, weight: Tensor) -> nn.Parameter:
    """Return the nearest bfloat16 parameter."""
    return nn.Parameter(weight.detach().bfloat16())


def as_int8(name: str, weight: Tensor) -> nn.Parameter:
    """Return torchao's INT8 weights of a linear layer, other weights in float32."""
    from torchao.prototype.quantized_training import Int8QuantizedTrainingLinearWeight

    if weight.dim() == 1 or "embedding" in name:
        return as_float32(name, weight)
    return nn.Parameter(Int8QuantizedTrainingLinearWeight.from_float(weight.detach()))


def values(p: nn.Parameter) -> Tensor:
    """Return the values of a parameter, float32."""
    is_int8 = hasattr(p, "__tensor_flatten__")
    return p.detach().dequantize() if is_int8 else p.detach().float()


@dataclass(frozen=True)
class Scheme:
    """States, or weights and states, that are measured.

    Attributes:
        make: returns the optimizer of named parameters for an algorithm and its keywords.
        stored: returns the parameter that keeps a named weight.
    """

    make: Callable[[str, Named, dict[str, Any]], Optimizer]
    stored: Callable[[str, Tensor], nn.Parameter] = as_float32


def _zero8(algorithm: str, named: Named, keywords: dict, **settings: Any) -> Optimizer:
    return CLASSES[algorithm](named, **keywords, **settings)


def _fp32(algorithm: str, named: Named, keywords: dict) -> Optimizer:
    """Return torch's AdamW, and for other algorithms zero8's with float32 states."""
    if algorithm == "Adam":
        return _peer("torch", algorithm, named, keywords)
    return _zero8(algorithm, named, keywords, **FP32_STATES)


def _peer(package: str, algorithm: str, named: Named, keywords: dict) -> Optimizer:
    """Return the AdamW of another package, as `benchmarks.step` times it."""
    peer = peers.PEERS[package]
    make = resolve_name(peer.classes[ADAM.name])
    return make([p for _, p in named], **peer.keywords(peers.FP32), **keywords)


PEERS = {
    "torch, bf16": Scheme(partial(_peer, "torch"), as_bfloat16),
    "deepspeed, bf16": Scheme(partial(_peer, "deepspeed"), as_bfloat16),
    "torchao": Scheme(partial(_peer, "torchao")),
    "bitsandbytes": Scheme(partial(_peer, "bitsandbytes")),
}
"""Adam's states elsewhere; with bfloat16 states parameters and updates are bfloat16, too."""
ROUNDINGS = {
    "nearest": {"stochastic_rounding": False},
    "hash": {"stochastic_rounding": "hash"},
    "dither": {"stochastic_rounding": "dither"},
}
WEIGHTS = {
    FP32_WEIGHTS: Scheme(_zero8),
    **{
        f"{name} weights, {rounding}": Scheme(partial(_zero8, **keywords), stored)
        for name, stored in (("bf16", as_bfloat16), ("INT8", as_int8))
        for rounding, keywords in ROUNDINGS.items()
    },
    "bf16 weights, corrected": Scheme(partial(_zero8, weight_correction_bits=8), as_bfloat16),
}
"""Ways to keep weights, all with states in the default codec."""
RIVALS = {
    name: Scheme(make, as_bfloat16 if name.startswith("bf16") else as_float32)
    for name, make in (ADAM_RIVALS | MUON_RIVALS).items()
}
"""States of papers, re-implemented."""
SCHEMES: dict[str, Scheme] = {
    FP32: Scheme(_fp32),
    CONTROL: Scheme(partial(_zero8, **FP32_STATES)),
    **{codec: Scheme(partial(_zero8, codec=codec)) for codec in CODECS},
    **PEERS,
    **RIVALS,
    **WEIGHTS,
}


class Rival:
    """Copies of a model's weights, kept by a scheme and stepped on gradients from elsewhere."""

    def __init__(self, scheme: Scheme, setting: Setting, weights: dict[str, Tensor]):
        """Copy weights, by name, and make their optimizer."""
        named = [(name, scheme.stored(name, weight)) for name, weight in weights.items()]
        self.params = [p for _, p in named]
        keywords = {"weight_decay": setting.weight_decay, "lr": setting.peak_lr, **setting.options}
        self.optimizer = scheme.make(setting.algorithm, named, keywords)

    def set_gradients(self, grads: list[Tensor]) -> None:
        """Give the copies their gradients, float32."""
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad.to(p.dtype, copy=True)

    def bytes_per_param(self) -> float:
        """Return the bytes of all tensors of the states, over the number of parameters."""
        return state_bytes(self.optimizer) / sum(p.numel() for p in self.params)


def usable(setting: Setting) -> tuple[Setting, list[dict]]:
    """Return a setting without the schemes that cannot take a step here, and why they cannot."""
    probe, skipped = torch.ones(256, 256), {}
    for name in dict.fromkeys((*setting.replayed, *setting.trained)):
        try:
            rival = Rival(SCHEMES[name], setting, {"probe": probe})
            rival.set_gradients([probe])
            rival.optimizer.step()
        except Exception as error:  # a package may be missing, or lack an op or a compiler
            skipped[name] = reason_of(error)
    kept = {
        field: tuple(name for name in getattr(setting, field) if name not in skipped)
        for field in ("replayed", "trained")
    }
    reasons = [{"setting": setting.name, "scheme": n, "reason": r} for n, r in skipped.items()]
    return replace(setting, **kept), reasons
