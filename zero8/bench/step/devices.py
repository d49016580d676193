# SPDX-License-Identifier: Apache-2.0
"""The differences between devices: checking bits, timing calls and copying memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zero8.bench.step import kernel as step_kernel
from zero8.bench.step.timing import (
    Samples,
    peak_extra_bytes,
    time_by_the_wall,
    time_on_gpu,
)
from zero8.bench.step.variants import CUDA_VARIANTS, VARIANTS, Variant
from zero8.op import cuda, kernel

Copier = Callable[[Tensor, Tensor, Sequence[Tensor]], Callable[[], object]]


@dataclass(frozen=True)
class Device:
    """A device that steps are timed on.

    Attributes:
        name: `cpu` or `cuda`.
        place: where the tensors are.
        numel: default number of parameters; no cache holds them.
        variants: kinds of parameters that zero8 is timed on.
        check: raises RuntimeError if the step's bits are wrong with these algorithms, codecs,
            instruction sets and number of threads.
        time_call: adds the time of a call to samples.
        extra_bytes: returns the peak of additional memory during a call, None if unknown.
        copier: returns a call that moves as many bytes as a step over a parameter, its gradient
            and its states, without computing.
        isa: returns the name of zero8's instruction set, or "cuda".
    """

    name: str
    place: torch.device
    numel: int
    variants: tuple[Variant, ...]
    check: Callable[[Sequence[str], Sequence[str], Sequence[str], int], None]
    time_call: Callable[[Callable[[], object], Samples], None]
    extra_bytes: Callable[[Callable[[], object]], int | None]
    copier: Copier
    isa: Callable[[], str]


def gpu_variants() -> tuple[Variant, ...]:
    """Return the kinds of parameters that this torch can have on a GPU."""
    # Only newer releases allow gradients of another dtype than their parameter's.
    return CUDA_VARIANTS if hasattr(Tensor, "grad_dtype") else VARIANTS


def _check_gpu(
    algorithms: Sequence[str], codecs: Sequence[str], isas: Sequence[str], num_threads: int
) -> None:
    step_kernel.check_on(torch.device("cuda"), cuda.step, algorithms, codecs)


def half_copier(param: Tensor, grad: Tensor, states: Sequence[Tensor]) -> Callable[[], object]:
    """Return a copy that reads half of the bytes of a step, and writes the other half."""
    half = grad.nbytes // 2 + sum(tensor.nbytes for tensor in (param, *states))
    source, target = torch.empty(2, half, dtype=torch.uint8, device=param.device).random_()
    return partial(target.copy_, source)


CPU = Device(
    name="cpu",
    place=torch.device("cpu"),
    numel=2**25,
    variants=VARIANTS,
    check=step_kernel.check,
    time_call=time_by_the_wall,
    extra_bytes=peak_extra_bytes,
    copier=lambda *tensors: partial(kernel.copy, *tensors),
    isa=kernel.default_isa,
)
GPU = Device(
    name="cuda",
    place=torch.device("cuda"),
    numel=2**26,
    variants=gpu_variants(),
    check=_check_gpu,
    time_call=time_on_gpu,
    extra_bytes=lambda call: None,
    copier=half_copier,
    isa=lambda: "cuda",
)
DEVICES = {device.name: device for device in (CPU, GPU)}
