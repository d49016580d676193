# SPDX-License-Identifier: Apache-2.0
"""The steps that are timed: zero8's, other optimizers', and copies as their ceilings."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.states import plain_tensors
from benchmarks.step.peers import CUDA_VARIANTS, PEERS, VARIANTS, Variant
from zero8 import bench
from zero8.bench import COLUMNS, wall_ns
from zero8.optimizer.elementwise import OPTIMIZERS
from zero8.spec.adam import ADAM
from zero8.spec.ademamix import ADEMAMIX
from zero8.spec.lion import LION
from zero8.spec.sgd import SGD

HYPER: dict[str, dict[str, Any]] = {
    ADAM.name: bench.HYPER,
    LION.name: {"lr": 1e-6, "betas": (0.9, 0.99), "weight_decay": 0.01},
    SGD.name: {"lr": 1e-6, "momentum": 0.9, "weight_decay": 0.01},
    ADEMAMIX.name: {
        "lr": 1e-6,
        "betas": (0.9, 0.999, 0.9999),
        "alpha": 5.0,
        "eps": 1e-8,
        "weight_decay": 0.01,
    },
}
"""Keywords by name of the algorithm.  Every package spells these as zero8 does."""

ZERO8 = {one.algorithm.name: one for one in OPTIMIZERS if one.algorithm.name in HYPER}
"""zero8's optimizers by name of the algorithm."""

# For a GPU of up to 2.5 GHz this is a wait of at least 1.6 times the host's time.
CYCLES_PER_NS = 4

# Of peers that are tens of times slower.
SLOW_NUMEL = 2**20

# Bits per element of arrays of states; what has fewer are scales of blocks.
WIDTHS = (4, 6, 8, 16, 32)


@dataclass(frozen=True)
class Contender:
    """A timed step over one parameter whose state exists.

    Attributes:
        name: `zero8`, a package, or `copy`.
        variant: the name of a kind of parameter.
        param: the parameter.
        states: the arrays of its state that have `WIDTHS` for each element.
        step: takes a step.
        codec: of zero8's states.
    """

    name: str
    variant: str
    param: nn.Parameter
    states: list[Tensor]
    step: Callable[[], object]
    codec: str | None = None

    @property
    def bytes_per_param(self) -> float:
        """Bytes that a step must move: it reads the gradient, and reads and writes all others.

        Without scales of blocks: 0.05 to 0.3 bytes.
        """
        both_ways = sum(t.nbytes for t in (self.param, *self.states))
        return (self.param.grad.nbytes + 2 * both_ways) / self.param.numel()


def variants_on(device: str) -> tuple[Variant, ...]:
    """Return the kinds of parameters that zero8 is timed on."""
    # Only newer releases of torch allow gradients of another dtype than their parameter's.
    return CUDA_VARIANTS if device == "cuda" and hasattr(Tensor, "grad_dtype") else VARIANTS


class Params:
    """Weights and gradients of one matrix on a device, which all contenders share."""

    def __init__(self, numel: int, device: str):
        """Defer making tensors."""
        self.numel, self.device = numel, device
        self._tensors: dict[tuple[torch.dtype, float], Tensor] = {}

    def parameter(self, variant: Variant) -> nn.Parameter:
        """Return a parameter of a variant with its gradient."""
        p = nn.Parameter(self._tensor(variant.dtype, 1.0))
        if variant.grad_dtype != variant.dtype:
            p.grad_dtype = variant.grad_dtype
        p.grad = self._tensor(variant.grad_dtype, 1e-3)
        return p

    def _tensor(self, dtype: torch.dtype, scale: float) -> Tensor:
        if (dtype, scale) not in self._tensors:
            made = torch.randn(self.numel // COLUMNS, COLUMNS, device=self.device)
            self._tensors[dtype, scale] = made.mul_(scale).to(dtype)
        return self._tensors[dtype, scale]


def zero8_contenders(algorithm: str, codecs: Sequence[str], params: Params) -> list[Contender]:
    """Return zero8 with these codecs on every kind of parameter."""
    found = []
    for variant in variants_on(params.device):
        p = params.parameter(variant)
        for codec in codecs:
            bits = variant.correction_bits
            optimizer = ZERO8[algorithm](
                [p], codec=codec, weight_correction_bits=bits, **HYPER[algorithm]
            )
            found.append(_contender("zero8", variant, p, optimizer, codec=codec))
    return found


def peer_contenders(
    algorithm: str, names: Sequence[str], params: Params
) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders of these packages, and the reasons of those that cannot step here."""
    found, skipped = [], {}
    for name in names:
        try:
            found += _of_peer(algorithm, name, params)
        except Exception as error:  # a package may be missing, or lack an op or a compiler
            skipped[name] = bench.reason_of(error)
    return found, skipped


def _of_peer(algorithm: str, name: str, params: Params) -> list[Contender]:
    peer = PEERS[name]
    if algorithm not in peer.classes:
        return []
    if peer.is_slow_on_cpu and params.device == "cpu":
        params = Params(min(SLOW_NUMEL, params.numel), params.device)
    make, found = resolve_name(peer.classes[algorithm]), []
    for variant in getattr(peer, params.device):
        p = params.parameter(variant)
        optimizer = make([p], **peer.keywords(variant), **HYPER[algorithm])
        peer.prepare(optimizer)
        unread = peer.unread.get(algorithm, ())
        found.append(_contender(name, variant, p, optimizer, unread))
    return found


def _contender(
    name: str,
    variant: Variant,
    p: nn.Parameter,
    optimizer: Optimizer,
    unread: Sequence[str] = (),
    codec: str | None = None,
) -> Contender:
    """Return an optimizer of one parameter as a contender, after a first step.

    `unread` are entries of its state that steps never read.
    """
    optimizer.step()
    read = {key: value for key, value in optimizer.state[p].items() if key not in unread}
    # bitsandbytes stacks two moments of AdEMAMix in one tensor.
    parts = [part for t in plain_tensors(read) for part in t.view(-1).split(p.numel())]
    states = [part for part in parts if 8 * part.nbytes in (bits * p.numel() for bits in WIDTHS)]
    return Contender(name, variant.name, p, states, optimizer.step, codec)


def copies(contenders: Sequence[Contender]) -> list[Contender]:
    """Return a copy of the bytes of each contender over all parameters, without equal ones."""
    found: dict[tuple[str, float], Contender] = {}
    numel = max(one.param.numel() for one in contenders)
    for one in contenders:
        key = one.variant, one.bytes_per_param
        if key not in found and one.param.numel() == numel:
            move = bench.copy(int(one.bytes_per_param * numel), one.param.device)
            found[key] = Contender("copy", one.variant, one.param, one.states, move)
    return list(found.values())


def cpu_ns(call: Callable[[], object]) -> tuple[int, int]:
    """Return the wall time of a call twice, for the host does it all."""
    return (taken_ns := wall_ns(call)), taken_ns


def gpu_ns(call: Callable[[], object]) -> tuple[float, int]:
    """Return the GPU's time of a call, and the host's without waiting for it.

    The GPU sleeps until the host has launched everything, as if behind the long queue of a
    training.  If a call waits for the GPU itself, that wait is included.
    """
    torch.cuda.synchronize()
    asked = time.perf_counter_ns()
    call()
    host_ns = time.perf_counter_ns() - asked
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES_PER_NS * host_ns)
    began.record()
    call()
    ended.record()
    ended.synchronize()
    return 1e6 * began.elapsed_time(ended), host_ns
