# SPDX-License-Identifier: Apache-2.0
"""The compiled step alone: checks its bits against the reference, and times it in the cache."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch

from zero8.algorithms.table import algorithm_called
from zero8.bench.step.algorithms import scalars_at
from zero8.bench.step.timing import spread
from zero8.bench.step.variants import CUDA_VARIANTS, VARIANTS, Variant
from zero8.op import kernel
from zero8.spec import dither, reference
from zero8.spec.codec import CODECS
from zero8.spec.segment import Moment, Rounding, Segment
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable

BLOCK_SIZE = 256

# A row of a whole block and a short one; one thread's share ends inside a row.
CHECK_SHAPE = (5, 300)
CHECK_STEPS = 3

# More thread blocks than a GPU runs at a time; whole blocks and short ones.
CUDA_CHECK_SHAPE = (1001, 2100)

# With fp32 parameters 160 KiB: more than a first-level cache, less than a second-level one.
CACHED_SHAPE = (64, 256)
CACHED_REPEATS = 30
CACHED_SECONDS = 2e-3  # of one repeat: much longer than the clock's resolution and Python's call


def sample(algorithm: str, codec: str, variant: Variant, shape: tuple[int, int]) -> Segment:
    """Return a segment before its first step, with values that depend on the arguments only."""
    numel, rules = shape[0] * shape[1], algorithm_called(algorithm)
    piece = Piece(0, numel, 0, shape, dither.identity_of("bench"), BLOCK_SIZE, "bench")
    table = PieceTable((piece,), numel)
    moments = [MomentStore.zeros(CODECS[codec], rule, table).piece(0) for rule in rules.moments]
    param = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(variant.dtype)
    correction = weight_sums = None
    if variant.correction_bits:
        correction = torch.zeros(numel, dtype=torch.int8)
        weight_sums = torch.zeros(piece.grid.num_blocks, 2, dtype=torch.int32)
    segment = Segment(
        param=param,
        grad=torch.empty_like(param, dtype=variant.grad_dtype),
        algorithm=rules,
        moments=moments,
        codec=CODECS[codec],
        grid=piece.grid,
        first=0,
        scalars=None,
        param_phase=0,
        rounding=Rounding.DITHER,
        correction=correction,
        weight_sums=weight_sums,
    )
    return prepared(segment, 1)


def prepared(segment: Segment, step: int) -> Segment:
    """Set the gradient, the scalars and the dither phases of a step; return the segment."""
    generator = torch.Generator().manual_seed(step)
    scale = torch.logspace(-6, 0, segment.grad.numel())
    segment.grad.copy_(torch.randn(segment.grad.numel(), generator=generator) * scale)
    segment.grad[::17] = 0.0
    segment.scalars = scalars_at(segment.algorithm, step)
    for moment in segment.moments:
        moment.phase = dither.phase_of(1, step)
    segment.param_phase = dither.phase_of(2, step)
    return segment


def check(
    algorithms: Iterable[str], codecs: Iterable[str], isas: Iterable[str], num_threads: int
) -> None:
    """Raise RuntimeError unless the kernel's bits are those of `zero8.spec.reference`."""
    for algorithm, codec, variant, isa in product(algorithms, codecs, VARIANTS, isas):
        ours, wanted = (sample(algorithm, codec, variant, CHECK_SHAPE) for _ in range(2))
        step = partial(_step_on_cpu, num_threads=num_threads, isa=isa)
        case = f"{algorithm}, codec {codec}, {variant.name}, on {isa}"
        _compare(case, (step, ours), (reference.step, wanted), "zero8.spec.reference")


def check_on(
    device: torch.device,
    step: Callable[[list[Segment]], object],
    algorithms: Iterable[str],
    codecs: Iterable[str],
    shapes: Iterable[tuple[int, int]] = (CHECK_SHAPE, CUDA_CHECK_SHAPE),
) -> None:
    """Raise RuntimeError unless a step on a device gives the same bits as on the CPU."""
    for *kind, variant, shape in product(algorithms, codecs, CUDA_VARIANTS, shapes):
        wanted = sample(*kind, variant, shape)
        ours = moved(wanted, device)
        case = f"{kind[0]}, codec {kind[1]}, {variant.name}, on {device}"
        _compare(case, (lambda one: step([one]), ours), (_step_on_cpu, wanted), "the CPU")


def moved(segment: Segment, device: torch.device) -> Segment:
    """Return a copy of a segment on a device."""

    def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device, copy=True)

    return replace(
        segment,
        param=copied(segment.param),
        grad=copied(segment.grad),
        correction=copied(segment.correction),
        weight_sums=copied(segment.weight_sums),
        moments=[Moment(copied(m.values), copied(m.scales), m.phase) for m in segment.moments],
    )


def _step_on_cpu(segment: Segment, num_threads: int | None = None, isa: str | None = None) -> None:
    kernel.step([segment], num_threads, isa)


Stepping = tuple[Callable[[Segment], object], Segment]


def _compare(case: str, ours: Stepping, wanted: Stepping, whose: str) -> None:
    for number in range(1, CHECK_STEPS + 1):
        for step, segment in (ours, wanted):
            step(prepared(segment, number))
        expected = _results(wanted[1])
        for name, tensor in _results(ours[1]).items():
            if not torch.equal(tensor, expected[name]):
                raise RuntimeError(
                    f"{name} of {case}: bits differ from {whose} after step {number}; nothing has "
                    "been timed"
                )


def _results(segment: Segment) -> dict[str, torch.Tensor]:
    """Return the bytes of everything that a step changes."""
    tensors = {"param": segment.param, "param_correction": segment.correction}
    for name, moment in zip(segment.algorithm.moment_names, segment.moments, strict=True):
        tensors |= {name: moment.values, f"{name}_scale": moment.scales}
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return {name: tensor.cpu().view(-1).view(torch.uint8) for name, tensor in found.items()}


def time_in_cache(
    algorithms: Iterable[str], codecs: Iterable[str], isas: Iterable[str]
) -> list[dict]:
    """Return a row per algorithm, codec, variant and instruction set: one thread's CPU time."""
    return [_cached_row(*case) for case in product(algorithms, codecs, VARIANTS, isas)]


def _cached_row(algorithm: str, codec: str, variant: Variant, isa: str) -> dict:
    segment = sample(algorithm, codec, variant, CACHED_SHAPE)
    records, scalars = kernel.packed([segment])
    _thread_ns(records, scalars, isa)
    once = _thread_ns(records, scalars, isa)
    batch = np.repeat(records, max(1, round(CACHED_SECONDS * 1e9 / once)))
    times = [_thread_ns(batch, scalars, isa) / len(batch) for _ in range(CACHED_REPEATS)]
    case = {"algorithm": algorithm, "codec": codec, "variant": variant.name, "isa": isa}
    return case | spread(times, segment.param.numel())


def _thread_ns(records: np.ndarray, scalars: np.ndarray, isa: str) -> int:
    began = time.thread_time_ns()
    kernel.run(records, scalars, 1, isa)
    return time.thread_time_ns() - began
