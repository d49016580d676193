# SPDX-License-Identifier: Apache-2.0
"""The steps that are timed: zero8's, other optimizers', and copies as their ceilings."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero8
from zero8.bench.states import plain_tensors
from zero8.bench.step.devices import CPU, Device
from zero8.bench.step.kernel import HYPER
from zero8.bench.step.tensors import flat_shape, model_shapes
from zero8.bench.step.timing import Timed
from zero8.bench.step.variants import BF16, BF16_CORRECTED, FP32, Variant

# Peers that are tens of times slower get fewer parameters, and are timed in one round of 5.
SLOW_NUMEL = 2**22
SLOW_EVERY = 5


@dataclass(frozen=True)
class Contender:
    """A timed step over one parameter whose state exists.

    Attributes:
        name: `zero8`, a package, or `copy`.
        variant: the name of a kind of parameter and state.
        param: the parameter.
        states: the arrays of its state with as many elements.
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
    def streams(self) -> tuple[int, ...]:
        """Bytes per element of the gradient, of the parameter and of the states."""
        return tuple(t.element_size() for t in (self.param.grad, self.param, *self.states))

    @property
    def bytes_per_param(self) -> int:
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
    name: str, variant: str, p: nn.Parameter, optimizer: Optimizer, **others: object
) -> Contender:
    """Return an optimizer of one parameter as a contender, after a first step."""
    optimizer.step()
    states = [t for t in plain_tensors(optimizer.state[p]) if t.numel() == p.numel()]
    return Contender(name, variant, p, states, optimizer.step, **others)


def zero8_contenders(codecs: Sequence[str], params: Params) -> list[Contender]:
    """Return zero8 with these codecs on every kind of parameter."""
    return [
        contender("zero8", v.name, p, _zero8([p], codec, v), codec=codec)
        for v in params.device.variants
        for p in [params.parameter(v)]
        for codec in codecs
    ]


def list_step(codec: str, numel: int, device: Device = CPU) -> Timed:
    """Return the step of zero8 over the tensors of a model, `numel` elements in all."""
    params = [
        _parameter(*(_random(shape, FP32.dtype, device.place, scale) for scale in (1.0, 1e-3)))
        for shape in model_shapes(numel)
    ]
    optimizer = _zero8(params, codec, FP32)
    optimizer.step()
    return Timed(optimizer.step)


def _zero8(params: list[nn.Parameter], codec: str, variant: Variant) -> Optimizer:
    bits = variant.correction_bits
    return zero8.Adam8bitBlockwise(params, codec=codec, weight_correction_bits=bits, **HYPER)


def copies(
    contenders: Sequence[Contender], device: Device = CPU
) -> dict[tuple[int, ...], Contender]:
    """Return, by `streams`, copies of as many bytes as contenders move."""
    found: dict[tuple[int, ...], Contender] = {}
    for ours in contenders:
        if ours.streams not in found and ours.every == 1:
            variant = ours.variant if ours.codec else f"{ours.variant}_states"
            move = device.copier(ours.param, ours.param.grad, ours.states)
            found[ours.streams] = Contender("copy", variant, ours.param, ours.states, move)
    return found


# --- Others --------------------------------------------------------------------------------------


class Peer(NamedTuple):
    """Another optimizer.

    Attributes:
        make: returns it for parameters of a variant.
        cpu: its variants on a CPU; () if it does not support CPUs.
        cuda: its variants on a GPU; () if it does not support GPUs.
        is_slow_on_cpu: whether it is tens of times slower on a CPU.
    """

    make: Callable[[list[nn.Parameter], Variant], Optimizer]
    cpu: tuple[Variant, ...] = ()
    cuda: tuple[Variant, ...] = ()
    is_slow_on_cpu: bool = False

    def contenders(self, name: str, params: Params) -> list[Contender]:
        """Return its steps on the device of parameters."""
        every = 1
        if self.is_slow_on_cpu and params.device.name == "cpu":
            params = Params(min(SLOW_NUMEL, params.numel), params.device)
            every = SLOW_EVERY
        return [
            contender(name, variant.name, p, self.make([p], variant), every=every)
            for variant in getattr(self, params.device.name)
            for p in [params.parameter(variant)]
        ]


def _deepspeed(params: list[nn.Parameter], variant: Variant) -> Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # States get the dtype of their parameters.
    optimizer = DeepSpeedCPUAdam(params, fp32_optimizer_states=False, **HYPER)
    set_threads(optimizer)
    return optimizer


def set_threads(optimizer: Optimizer) -> None:
    """Give a DeepSpeedCPUAdam as many threads as torch has, in whichever OpenMP it is linked to."""
    library = optimizer.ds_opt_adam.__file__
    openmp, expected = ctypes.CDLL(library), torch.get_num_threads()
    openmp.omp_set_num_threads(expected)
    if (threads := openmp.omp_get_max_threads()) != expected:
        raise RuntimeError(f"got {threads} OpenMP threads in {library}, expected {expected}")


def _torch(params: list[nn.Parameter], variant: Variant) -> Optimizer:
    return torch.optim.AdamW(params, fused=True, **HYPER)


def _bitsandbytes(params: list[nn.Parameter], variant: Variant) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, **HYPER)


def _torchao(params: list[nn.Parameter], variant: Variant) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, block_size=256, **HYPER)


def _flashoptim(params: list[nn.Parameter], variant: Variant) -> Optimizer:
    from flashoptim import FlashAdamW

    bits = 24 if variant.correction_bits else None
    return FlashAdamW(params, master_weight_bits=bits, **HYPER)


PEERS = {
    "deepspeed": Peer(_deepspeed, cpu=(FP32, BF16)),
    "torch": Peer(_torch, cpu=(FP32,), cuda=(FP32, BF16)),
    "bitsandbytes": Peer(_bitsandbytes, (FP32,), (FP32, BF16), is_slow_on_cpu=True),
    "torchao": Peer(_torchao, (FP32,), (FP32,), is_slow_on_cpu=True),
    "flashoptim": Peer(_flashoptim, cuda=(FP32, BF16_CORRECTED)),
}


def peers_on(device: Device) -> tuple[str, ...]:
    """Return the names of the optimizers that step on a device."""
    return tuple(name for name, peer in PEERS.items() if getattr(peer, device.name))


def peer_contenders(names: Sequence[str], params: Params) -> tuple[list[Contender], list[dict]]:
    """Return the contenders of these packages, and the reasons of those that cannot step here."""
    found, skipped = [], []
    for name in names:
        try:
            found += PEERS[name].contenders(name, params)
        except Exception as error:  # a package may be missing, or lack an op or a compiler
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            skipped.append({"name": name, "reason": reason})
    return found, skipped
