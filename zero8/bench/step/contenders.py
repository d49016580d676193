# SPDX-License-Identifier: Apache-2.0
"""The steps that are timed: zero8's, other optimizers', and copies as their ceilings."""

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero8.algorithms.adam import ADAM
from zero8.algorithms.ademamix import ADEMAMIX
from zero8.algorithms.lion import LION
from zero8.algorithms.sgd import SGD
from zero8.bench.states import plain_tensors
from zero8.bench.step.algorithms import HYPER, ZERO8
from zero8.bench.step.devices import CPU, Device
from zero8.bench.step.tensors import flat_shape, model_shapes
from zero8.bench.step.timing import Timed
from zero8.bench.step.variants import BF16, BF16_CORRECTED, FP32, Variant
from zero8.spec.codec import CODECS

# Peers that are tens of times slower get fewer parameters, and are timed in one round of 5.
SLOW_NUMEL = 2**22
SLOW_EVERY = 5

# Bits per element of arrays of states; what has fewer are scales of blocks.
WIDTHS = (4, 6, 8, 16, 32)


@dataclass(frozen=True)
class Contender:
    """A timed step over one parameter whose state exists.

    Attributes:
        name: `zero8`, a package, or `copy`.
        variant: the name of a kind of parameter and state.
        param: the parameter.
        states: the arrays of its state that have `WIDTHS` for each element.
        step: takes a step.
        codec: of zero8's states.
        every: it is timed in every `every`-th round.
    """

    name: str
    variant: str
    param: nn.Parameter
    states: list[Tensor]
    step: Callable[[], object]
    codec: str | None = None
    every: int = 1

    @property
    def streams(self) -> tuple[float, ...]:
        """Bytes per element of the gradient, of the parameter and of the states."""
        arrays = self.param.grad, self.param, *self.states
        return tuple(t.nbytes / self.param.numel() for t in arrays)

    @property
    def bytes_per_param(self) -> float:
        """Bytes that a step must move: it reads the gradient, and reads and writes all others.

        Without scales of blocks: 0.05 to 0.3 bytes.
        """
        grad, *others = self.streams
        return grad + 2 * sum(others)

    @property
    def timed(self) -> Timed:
        """The call to time."""
        return Timed(self.step, self.every)


class Params:
    """Weights and gradients of one matrix on a device, which all contenders share."""

    def __init__(self, numel: int, device: Device):
        """Defer making tensors."""
        self.numel, self.device = numel, device
        self._tensors: dict[tuple[torch.dtype, float], Tensor] = {}

    def parameter(self, variant: Variant) -> nn.Parameter:
        """Return a parameter of a variant with its gradient."""
        return _parameter(self._tensor(variant.dtype, 1.0), self._tensor(variant.grad_dtype, 1e-3))

    def _tensor(self, dtype: torch.dtype, scale: float) -> Tensor:
        if (dtype, scale) not in self._tensors:
            made = _random(flat_shape(self.numel), dtype, self.device.place, scale)
            self._tensors[dtype, scale] = made
        return self._tensors[dtype, scale]


def flat_params(numel: int, device: Device = CPU) -> Params:
    """Return the tensors of one matrix of `numel` elements."""
    return Params(numel, device)


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, place: torch.device, scale: float
) -> Tensor:
    generator = torch.Generator(place).manual_seed(round(1 / scale))
    return torch.randn(shape, generator=generator, device=place).mul_(scale).to(dtype)


def _parameter(weight: Tensor, grad: Tensor) -> nn.Parameter:
    p = nn.Parameter(weight)
    if grad.dtype != weight.dtype:
        p.grad_dtype = grad.dtype
    p.grad = grad
    return p


def contender(
    name: str,
    variant: str,
    p: nn.Parameter,
    optimizer: Optimizer,
    unread: Collection[str] = (),
    **others: Any,
) -> Contender:
    """Return an optimizer of one parameter as a contender, after a first step.

    Args:
        name: `zero8`, or a package.
        variant: the name of the kind of parameter.
        p: the parameter.
        optimizer: its optimizer.
        unread: entries of its state that steps never read.
        **others: further fields of the contender.
    """
    optimizer.step()
    read = {key: value for key, value in optimizer.state[p].items() if key not in unread}
    # bitsandbytes stacks two moments of AdEMAMix in one tensor.
    parts = [part for t in plain_tensors(read) for part in t.view(-1).split(p.numel())]
    states = [part for part in parts if 8 * part.nbytes in (bits * p.numel() for bits in WIDTHS)]
    return Contender(name, variant, p, states, optimizer.step, **others)


def zero8_contenders(
    codecs: Sequence[str], params: Params, algorithm: str = ADAM.name
) -> list[Contender]:
    """Return zero8 with these codecs on every kind of parameter."""
    return [
        contender("zero8", v.name, p, _zero8(algorithm, [p], codec, v), codec=codec)
        for v in params.device.variants
        for p in [params.parameter(v)]
        for codec in codecs
    ]


def list_step(codec: str, numel: int, device: Device = CPU, algorithm: str = ADAM.name) -> Timed:
    """Return the step of zero8 over the tensors of a model, `numel` elements in all."""
    params = [
        _parameter(*(_random(shape, FP32.dtype, device.place, scale) for scale in (1.0, 1e-3)))
        for shape in model_shapes(numel)
    ]
    optimizer = _zero8(algorithm, params, codec, FP32)
    optimizer.step()
    return Timed(optimizer.step)


def _zero8(algorithm: str, params: list[nn.Parameter], codec: str, variant: Variant) -> Optimizer:
    kept = {"codec": codec, "weight_correction_bits": variant.correction_bits}
    return ZERO8[algorithm](params, **kept, **HYPER[algorithm])


def copies(
    contenders: Sequence[Contender], device: Device = CPU
) -> dict[tuple[float, ...], Contender]:
    """Return, by `streams`, copies of as many bytes as contenders move."""
    found: dict[tuple[float, ...], Contender] = {}
    for ours in contenders:
        if ours.streams not in found and ours.every == 1:
            bits = CODECS[ours.codec].of_signed.bits if ours.codec else 0
            suffix = {0: "_states", 8: ""}.get(bits, f"_{bits}_bits")
            variant = ours.variant + suffix
            move = device.copier(ours.param, ours.param.grad, ours.states)
            found[ours.streams] = Contender("copy", variant, ours.param, ours.states, move)
    return found


# --- Others --------------------------------------------------------------------------------------


class Peer(NamedTuple):
    """Optimizers of another package.

    Attributes:
        classes: the optimizers by name of the algorithm, as `module:class`.
        cpu: their variants on a CPU; () if they do not support CPUs.
        cuda: their variants on a GPU; () if they do not support GPUs.
        keywords: returns the keywords for a variant besides the settings that all packages get.
        prepare: is called with a new optimizer.
        is_slow_on_cpu: whether they are tens of times slower on a CPU.
        unread: by name of the algorithm, entries of states that steps never read.
    """

    classes: Mapping[str, str]
    cpu: tuple[Variant, ...] = ()
    cuda: tuple[Variant, ...] = ()
    keywords: Callable[[Variant], dict[str, Any]] = lambda variant: {}
    prepare: Callable[[Optimizer], object] = lambda optimizer: None
    is_slow_on_cpu: bool = False
    unread: Mapping[str, Collection[str]] = MappingProxyType({})

    def contenders(self, name: str, params: Params, algorithm: str) -> list[Contender]:
        """Return its steps on the device of parameters; none if it lacks the algorithm."""
        if algorithm not in self.classes:
            return []
        every = 1
        if self.is_slow_on_cpu and params.device.name == "cpu":
            params = Params(min(SLOW_NUMEL, params.numel), params.device)
            every = SLOW_EVERY
        make, unread = resolve_name(self.classes[algorithm]), self.unread.get(algorithm, ())
        found = []
        for variant in getattr(self, params.device.name):
            p = params.parameter(variant)
            optimizer = make([p], **self.keywords(variant), **HYPER[algorithm])
            self.prepare(optimizer)
            found.append(contender(name, variant.name, p, optimizer, unread, every=every))
        return found


def set_threads(optimizer: Optimizer) -> None:
    """Give an optimizer of DeepSpeed as many threads as torch, in the OpenMP it is linked to."""
    (op,) = (value for name, value in vars(optimizer).items() if name.startswith("ds_opt_"))
    openmp, expected = ctypes.CDLL(op.__file__), torch.get_num_threads()
    openmp.omp_set_num_threads(expected)
    if (threads := openmp.omp_get_max_threads()) != expected:
        raise RuntimeError(f"got {threads} OpenMP threads in {op.__file__}, expected {expected}")


PEERS = {
    "deepspeed": Peer(
        {
            ADAM.name: "deepspeed.ops.adam:DeepSpeedCPUAdam",
            LION.name: "deepspeed.ops.lion:DeepSpeedCPULion",
        },
        cpu=(FP32, BF16),
        keywords=lambda variant: {"fp32_optimizer_states": False},  # but the parameters' dtype
        prepare=set_threads,
        unread={LION.name: ["exp_avg_sq"]},
    ),
    "torch": Peer(
        {ADAM.name: "torch.optim:AdamW", SGD.name: "torch.optim:SGD"},
        cpu=(FP32,),
        cuda=(FP32, BF16),
        keywords=lambda variant: {"fused": True},
    ),
    "bitsandbytes": Peer(
        {
            ADAM.name: "bitsandbytes.optim:AdamW8bit",
            LION.name: "bitsandbytes.optim:Lion8bit",
            SGD.name: "bitsandbytes.optim:SGD8bit",
            ADEMAMIX.name: "bitsandbytes.optim:AdEMAMix8bit",
        },
        cpu=(FP32,),
        cuda=(FP32, BF16),
        is_slow_on_cpu=True,
    ),
    "torchao": Peer(
        {ADAM.name: "torchao.optim:AdamW8bit"},
        cpu=(FP32,),
        cuda=(FP32,),
        keywords=lambda variant: {"block_size": 256},
        is_slow_on_cpu=True,
    ),
    "flashoptim": Peer(
        {
            ADAM.name: "flashoptim:FlashAdamW",
            LION.name: "flashoptim:FlashLion",
            SGD.name: "flashoptim:FlashSGD",
        },
        cuda=(FP32, BF16_CORRECTED),
        keywords=lambda variant: {"master_weight_bits": 24 if variant.correction_bits else None},
    ),
}


def peers_on(device: Device) -> tuple[str, ...]:
    """Return the names of the packages whose optimizers step on a device."""
    return tuple(name for name, peer in PEERS.items() if getattr(peer, device.name))


def peer_contenders(
    names: Sequence[str], params: Params, algorithm: str = ADAM.name
) -> tuple[list[Contender], list[dict]]:
    """Return the contenders of these packages, and the reasons of those that cannot step here."""
    found, skipped = [], []
    for name in names:
        try:
            found += PEERS[name].contenders(name, params, algorithm)
        except Exception as error:  # a package may be missing, or lack an op or a compiler
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            skipped.append({"name": name, "reason": reason})
    return found, skipped
