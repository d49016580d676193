# SPDX-License-Identifier: Apache-2.0
"""Whose steps are timed: zero8's, those of other optimizers, and copies as their ceilings."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero8
from zero8.bench.states import plain_tensors
from zero8.bench.step.kernel import HYPER
from zero8.bench.step.tensors import flat_shape, model_shapes
from zero8.bench.step.timing import Timed
from zero8.bench.step.variants import BF16, FP32, VARIANTS, Variant
from zero8.op import kernel

# What is tens of times slower has fewer parameters, and one round in 5.
SLOW_NUMEL = 2**22
SLOW_EVERY = 5


@dataclass(frozen=True)
class Contender:
    """A step that is timed, over one parameter whose state exists.

    Attributes:
        name: whose it is: `zero8`, a package, or `copy`.
        variant: which kind of parameter and state; a name.
        param: what is stepped over.
        states: the arrays of its state that have as many elements as it has.
        step: takes a step.
        codec: of zero8's states.
        every: in every how many rounds it is timed.
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
        """Bytes per element of the parameter and of the states."""
        return tuple(t.element_size() for t in (self.param, *self.states))

    @property
    def bytes_per_param(self) -> int:
        """Bytes that a step must move: it reads the gradient, and reads and writes all else.

        Scales of blocks are left out: 0.1 bytes.
        """
        return self.param.grad.element_size() + 2 * sum(self.streams)

    @property
    def timed(self) -> Timed:
        """What to time."""
        return Timed(self.step, self.every)


Params = dict[torch.dtype, nn.Parameter]


def flat_params(numel: int) -> Params:
    """Return one matrix of each type of parameter; all contenders share them."""
    return {dtype: _params([flat_shape(numel)], dtype)[0] for dtype in {v.dtype for v in VARIANTS}}


def _params(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    generator, params = torch.Generator().manual_seed(0), []
    for shape in shapes:
        p = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        p.grad = torch.randn(shape, generator=generator).mul_(1e-3).to(dtype)
        params.append(p)
    return params


def contender(
    name: str, variant: str, p: nn.Parameter, optimizer: Optimizer, **others: object
) -> Contender:
    """Return an optimizer of one parameter as a contender; its first step makes the state."""
    optimizer.step()
    states = [t for t in plain_tensors(optimizer.state[p]) if t.numel() == p.numel()]
    return Contender(name, variant, p, states, optimizer.step, **others)


def zero8_contenders(codecs: list[str], params: Params) -> list[Contender]:
    """Return zero8 with these codecs on every kind of parameter."""
    return [
        contender("zero8", v.name, p, _zero8([p], codec, v), codec=codec)
        for v in VARIANTS
        for p in [params[v.dtype]]
        for codec in codecs
    ]


def list_step(codec: str, numel: int) -> Timed:
    """Return the step of zero8 over the tensors of a model, `numel` elements in all."""
    optimizer = _zero8(_params(model_shapes(numel), FP32.dtype), codec, FP32)
    optimizer.step()
    return Timed(optimizer.step)


def _zero8(params: list[nn.Parameter], codec: str, variant: Variant) -> Optimizer:
    bits = variant.correction_bits
    return zero8.Adam8bitBlockwise(params, codec=codec, weight_correction_bits=bits, **HYPER)


def copies(contenders: list[Contender]) -> dict[tuple[int, ...], Contender]:
    """Return, by `streams`, copies of the memory of contenders, on their own tensors."""
    found: dict[tuple[int, ...], Contender] = {}
    for ours in contenders:
        if ours.streams not in found and ours.every == 1:
            variant = ours.variant if ours.codec else f"{ours.variant}_states"
            move = partial(kernel.copy, ours.param, ours.param.grad, ours.states)
            found[ours.streams] = Contender("copy", variant, ours.param, ours.states, move)
    return found


# --- Others --------------------------------------------------------------------------------------


def _deepspeed(params: Params) -> list[Contender]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    found = []
    for variant in (FP32, BF16):
        p = params[variant.dtype]
        # States in float32 for float32 parameters, in bfloat16 for bfloat16 ones.
        optimizer = DeepSpeedCPUAdam([p], fp32_optimizer_states=False, **HYPER)
        set_threads(optimizer)
        found.append(contender("deepspeed", variant.name, p, optimizer))
    return found


def set_threads(optimizer: Optimizer) -> None:
    """Give a DeepSpeedCPUAdam as many threads as torch has, whichever OpenMP it brought along."""
    library = optimizer.ds_opt_adam.__file__
    openmp, expected = ctypes.CDLL(library), torch.get_num_threads()
    openmp.omp_set_num_threads(expected)
    if (threads := openmp.omp_get_max_threads()) != expected:
        raise RuntimeError(f"got {threads} OpenMP threads in {library}, expected {expected}")


def _torch(params: Params) -> list[Contender]:
    p = params[FP32.dtype]
    return [contender("torch", FP32.name, p, torch.optim.AdamW([p], fused=True, **HYPER))]


def _bitsandbytes(params: Params) -> list[Contender]:
    from bitsandbytes.optim import AdamW8bit

    return [_slow("bitsandbytes", params, AdamW8bit)]


def _torchao(params: Params) -> list[Contender]:
    from torchao.optim import AdamW8bit

    return [_slow("torchao", params, partial(AdamW8bit, block_size=256))]


def _slow(name: str, params: Params, make: Callable[..., Optimizer]) -> Contender:
    numel = min(SLOW_NUMEL, params[FP32.dtype].numel())
    (p,) = _params([flat_shape(numel)], FP32.dtype)
    return contender(name, FP32.name, p, make([p], **HYPER), every=SLOW_EVERY)


PEERS = {
    "deepspeed": _deepspeed,
    "torch": _torch,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
}


def peer_contenders(names: list[str], params: Params) -> tuple[list[Contender], list[dict]]:
    """Return the contenders of these packages, and of those that cannot step here the reasons."""
    found, skipped = [], []
    for name in names:
        try:
            found += PEERS[name](params)
        except Exception as error:  # a package may be missing, or lack an op or a compiler
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            skipped.append({"name": name, "reason": reason})
    return found, skipped
