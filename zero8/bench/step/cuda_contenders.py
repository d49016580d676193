# SPDX-License-Identifier: Apache-2.0
"""Whose steps are timed on a GPU: zero8's, those of other optimizers, and copies as ceilings."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero8
from zero8.bench.step.contenders import Contender, contender
from zero8.bench.step.kernel import HYPER
from zero8.bench.step.tensors import NUM_TENSORS, flat_shape, model_shapes
from zero8.bench.step.variants import BF16, BF16_CORRECTED, CUDA_VARIANTS, FP32, Variant
from zero8.spec.codec import DEFAULT_CODEC

# torch's fp32 AdamW reads 16 and writes 12.
MOST_BYTES_PER_PARAM = 28

Make = Callable[[list[nn.Parameter]], Optimizer]


class Timeable(NamedTuple):
    """A step that is timed, or a copy.

    Attributes:
        name: whose it is: `zero8`, a package, or `copy`.
        variant: which kind of parameter and gradient; of a copy, how many bytes.
        codec: of zero8's states.
        bytes_per_param: what it reads and writes, without scales of blocks.
        call: takes a step, which the host does not wait for.
    """

    name: str
    variant: str
    codec: str | None
    bytes_per_param: int
    call: Callable[[], object]

    @classmethod
    def of(cls, one: Contender) -> "Timeable":
        """Return the step of a contender."""
        return cls(one.name, one.variant, one.codec, one.bytes_per_param, one.step)


class Skipped:
    """What could not be timed where, and why."""

    def __init__(self):
        """Begin with nothing."""
        self._places: dict[tuple[str, str], list[str]] = {}

    def add(self, name: str, place: str, reason: Exception | str) -> None:
        """Note one."""
        if isinstance(reason, Exception):
            reason = f"{type(reason).__name__}: {reason}".splitlines()[0]
        self._places.setdefault((name, reason), []).append(place)

    @property
    def entries(self) -> list[dict]:
        """Return a name and a reason for each, with all places of the same reason in the name."""
        return [
            {"name": f"{name} ({', '.join(places)})", "reason": reason}
            for (name, reason), places in self._places.items()
        ]


def size_name(numel: int) -> str:
    """Return a number of parameters as people write it."""
    power = numel.bit_length() - 1
    return f"2^{power}" if numel == 2**power else f"{numel:,}"


class Weights:
    """Weights and gradients of one matrix, which all contenders share."""

    def __init__(self, numel: int, device: torch.device):
        """Make nothing yet."""
        self._numel, self._device = numel, device
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def parameter(self, variant: Variant) -> nn.Parameter:
        """Return a parameter of a variant with its gradient."""
        return _parameter(
            self._tensor("weight", variant.dtype), self._tensor("grad", variant.grad_dtype)
        )

    def _tensor(self, kind: str, dtype: torch.dtype) -> Tensor:
        if (kind, dtype) not in self._kept:
            scale = 1.0 if kind == "weight" else 1e-3
            made = _random(flat_shape(self._numel), dtype, self._device, scale)
            self._kept[kind, dtype] = made
        return self._kept[kind, dtype]


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, scale: float
) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype)


def _parameter(weight: Tensor, grad: Tensor) -> nn.Parameter:
    p = nn.Parameter(weight)
    if grad.dtype != weight.dtype:
        if not hasattr(Tensor, "grad_dtype"):
            raise ValueError(f"torch {torch.__version__} has no Tensor.grad_dtype")
        p.grad_dtype = grad.dtype
    p.grad = grad
    return p


def timeables(
    codecs: Sequence[str],
    peers: Sequence[str],
    numel: int,
    device: torch.device,
    skipped: Skipped,
) -> list[Timeable]:
    """Return the steps over one matrix, and a copy of as many bytes for each kind of them.

    Raises:
        torch.OutOfMemoryError: if not even the copies fit.
    """
    buffer = _copy_buffer(numel, device)
    weights, found = Weights(numel, device), []
    # What a GPU without enough memory leaves out comes last.
    ours = [(v, codec) for codec in sorted(codecs, key=_is_other) for v in CUDA_VARIANTS]
    cases: list[tuple[str, Variant, str | None, Make]] = [
        ("zero8", variant, codec, partial(_zero8, codec, variant)) for variant, codec in ours
    ]
    for name in peers:
        cases += [(name, v, None, partial(PEERS[name].make, v)) for v in PEERS[name].variants]
    for name, variant, codec, make in cases:
        try:
            p = weights.parameter(variant)
            found.append(Timeable.of(contender(name, variant.name, p, make([p]), codec=codec)))
        except _expected(name) as error:
            label = " ".join(filter(None, (name, variant.name, codec)))
            skipped.add(label, size_name(numel), error)
    kinds = sorted({one.bytes_per_param for one in found})
    return found + [_copy(buffer, numel, count) for count in kinds]


def _is_other(codec: str) -> bool:
    return codec != DEFAULT_CODEC


def _expected(name: str) -> tuple[type[Exception], ...]:
    """Return what may keep a step from being timed: of others, whatever does not work here."""
    return (torch.OutOfMemoryError, ValueError) if name == "zero8" else (Exception,)


def list_timeables(
    codec: str, peers: Sequence[str], numel: int, device: torch.device, skipped: Skipped
) -> list[tuple[Timeable, Timeable]]:
    """Return fp32 steps over the tensors of a model, each with the one over a single matrix."""
    makes: dict[str, Make] = {"zero8": partial(_zero8, codec, FP32)}
    makes |= {name: partial(PEERS[name].make, FP32) for name in peers}
    found = []
    for name, make in makes.items():
        its_codec = codec if name == "zero8" else None
        if name in COMPILED:
            skipped.add(name, f"{NUM_TENSORS} tensors", "it is compiled for each of their shapes")
            continue
        try:
            p = Weights(numel, device).parameter(FP32)
            flat = Timeable.of(contender(name, FP32.name, p, make([p]), codec=its_codec))
            optimizer = make(_model(numel, device))
            optimizer.step()
            found.append((flat, flat._replace(call=optimizer.step)))
        except _expected(name) as error:
            skipped.add(name, f"{NUM_TENSORS} tensors", error)
    return found


def _model(numel: int, device: torch.device) -> list[nn.Parameter]:
    tensors = [
        [_random(shape, FP32.dtype, device, scale) for scale in (1.0, 1e-3)]
        for shape in model_shapes(numel)
    ]
    return [_parameter(*pair) for pair in tensors]


def _copy_buffer(numel: int, device: torch.device) -> Tensor:
    """Return bytes to copy from and to copy to: no step moves more."""
    half = numel * MOST_BYTES_PER_PARAM // 2
    return torch.empty(2, half, dtype=torch.uint8, device=device).random_()


def _copy(buffer: Tensor, numel: int, bytes_per_param: int) -> Timeable:
    """Return a copy that reads half of the bytes of a step, and writes the other half."""
    source, target = buffer[:, : numel * bytes_per_param // 2]
    name = f"{bytes_per_param} bytes"
    return Timeable("copy", name, None, bytes_per_param, partial(target.copy_, source))


# --- Whose ---------------------------------------------------------------------------------------


def _zero8(codec: str, variant: Variant, params: list[nn.Parameter]) -> Optimizer:
    bits = variant.correction_bits
    return zero8.Adam8bitBlockwise(params, codec=codec, weight_correction_bits=bits, **HYPER)


class Peer(NamedTuple):
    """Another optimizer, and what it is timed on."""

    make: Callable[[Variant, list[nn.Parameter]], Optimizer]
    variants: tuple[Variant, ...]


def _torch(variant: Variant, params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(params, fused=True, **HYPER)


def _bitsandbytes(variant: Variant, params: list[nn.Parameter]) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, **HYPER)


def _torchao(variant: Variant, params: list[nn.Parameter]) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, block_size=256, **HYPER)


def _flashoptim(variant: Variant, params: list[nn.Parameter]) -> Optimizer:
    from flashoptim import FlashAdamW

    bits = 24 if variant.correction_bits else None
    return FlashAdamW(params, master_weight_bits=bits, **HYPER)


PEERS = {
    "torch": Peer(_torch, (FP32, BF16)),
    "bitsandbytes": Peer(_bitsandbytes, (FP32, BF16)),
    "torchao": Peer(_torchao, (FP32,)),
    "flashoptim": Peer(_flashoptim, (FP32, BF16_CORRECTED)),
}
COMPILED = ("torchao",)
