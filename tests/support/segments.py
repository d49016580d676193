# SPDX-License-Identifier: Apache-2.0
"""Segments for tests of the compiled step and of the reference."""

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from zero8.spec import int8_rows
from zero8.spec.adam import ADAM
from zero8.spec.ademamix import ADEMAMIX
from zero8.spec.algorithm import MomentRule, Scalars
from zero8.spec.algorithms import ALGORITHMS
from zero8.spec.codec import CODECS, quantize
from zero8.spec.grid import BlockGrid
from zero8.spec.lion import LION
from zero8.spec.packing import packed, unpacked
from zero8.spec.segment import Moment, Rounding, Segment
from zero8.spec.sgd import SGD

CODEC_NAMES = [None, *CODECS]
JUST_NEAREST = 1 / (1 + 2 / 3 / 32 / 0.97)  # its settling is `least_settling`
MOMENT_PHASE = 0x9E3779B9
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

DTYPES = {
    "fp32 from fp32": (FP32, FP32, Rounding.DITHER),
    "fp32 from bf16": (FP32, BF16, Rounding.DITHER),
    "fp32 from fp16": (FP32, FP16, Rounding.DITHER),
    "bf16 from fp32, nearest": (BF16, FP32, Rounding.NEAREST),
    "bf16 from fp32, dither": (BF16, FP32, Rounding.DITHER),
    "bf16 from fp32, hash": (BF16, FP32, Rounding.HASH),
    "bf16 from bf16, nearest": (BF16, BF16, Rounding.NEAREST),
    "bf16 from bf16, dither": (BF16, BF16, Rounding.DITHER),
    "bf16 from bf16, hash": (BF16, BF16, Rounding.HASH),
}
"""Dtypes of parameter and gradient, and the rounding."""

HYPERS = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    # Exact betas: moments fall on the middle between two codes.
    "exact betas": {"lr": 0.25, "betas": (0.5, 0.25), "eps": 0.0, "weight_decay": 0.0},
    "l2": {
        "lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.3, "decoupled": False
    },
    "subnormal l2, maximize": {
        "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 1e-40, "decoupled": False,
        "maximize": True,
    },
    "no memory": {"lr": 1e-3, "betas": (0.0, 0.0), "eps": 1e-8, "weight_decay": 0.1},
    "large eps": {"lr": 1.0, "betas": (0.95, 0.9), "eps": 1.0, "weight_decay": 0.5},
    # On both sides of `least_settling` of `log`, and moments on levels and halfway between them.
    "beta1 just nearest": {
        "lr": 1e-3, "betas": (JUST_NEAREST, 0.999), "eps": 1e-8, "weight_decay": 0.1
    },
    "beta1 just dithered": {"lr": 1e-3, "betas": (0.979, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "long beta1": {
        "lr": 1e-3, "betas": (0.99, 0.999), "eps": 1e-8, "weight_decay": 0.1, "grad_factor": 0.5
    },
    "exact long beta1": {"lr": 0.25, "betas": (127 / 128, 0.25), "eps": 0.0, "weight_decay": 0.0},
    "lion": {"algorithm": LION, "lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "lion, exact betas, maximize": {
        "algorithm": LION, "lr": 0.25, "betas": (0.5, 0.25), "maximize": True
    },
    "factor, l2, maximize": {
        "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "decoupled": False,
        "maximize": True, "grad_factor": 21 / 128,
    },
    "lion, factor": {
        "algorithm": LION, "lr": 1e-3, "betas": (0.9, 0.99), "grad_factor": 21 / 128
    },
    "lion, no memory": {"algorithm": LION, "lr": 1e-3, "betas": (0.0, 0.0)},
    "sgd": {"algorithm": SGD, "lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    "sgd, nesterov, decoupled, maximize, factor": {
        "algorithm": SGD, "lr": 1e-2, "momentum": 0.99, "weight_decay": 0.1, "nesterov": True,
        "decoupled_weight_decay": True, "maximize": True, "grad_factor": 21 / 128,
    },
    "ademamix": {
        "algorithm": ADEMAMIX, "lr": 1e-3, "weight_decay": 0.1, "t_alpha": 5, "t_beta3": 9
    },
    "ademamix, maximize, factor": {
        "algorithm": ADEMAMIX, "lr": 1e-2, "betas": (0.5, 0.75, 0.875), "alpha": 2.0,
        "maximize": True, "grad_factor": 21 / 128,
    },
    "ademamix, long beta1": {
        "algorithm": ADEMAMIX, "lr": 1e-3, "betas": (0.99, 0.999, 0.9999), "weight_decay": 0.1
    },
    "sgd, dampening": {"algorithm": SGD, "lr": 0.25, "momentum": 0.5, "dampening": 0.25},
    "subnormal scalars": {"lr": 1e-40, "betas": (1e-30, 0.9), "eps": 1e-40, "weight_decay": 0.1},
    "large rate": {"lr": 2.0**119, "betas": (0.9, 0.999), "eps": 1.0, "weight_decay": 0.0},
    "lion, subnormal scalars": {"algorithm": LION, "lr": 1e-40, "betas": (1e-30, 0.9)},
    "sgd, subnormal scalars": {"algorithm": SGD, "lr": 1e-40, "momentum": 1e-30},
}  # fmt: skip
"""Hyperparameters, as `scalars_at` takes them."""


@dataclass(frozen=True)
class Place:
    """Where a segment lies: elements first .. first + numel - 1 of a parameter of this shape."""

    shape: tuple[int, ...]
    block_size: int
    first: int
    numel: int
    offset: int = 0  # of every buffer from its allocation, in elements

    def grid(self, codec: str | None) -> BlockGrid:
        if codec is None:
            return BlockGrid(1, max(1, math.prod(self.shape)), self.block_size)
        return BlockGrid.of(self.shape, self.block_size)


def shifted(x: torch.Tensor, offset: int, device: str = "cpu") -> torch.Tensor:
    """Return a copy that starts `offset` elements after the start of an allocation."""
    buffer = torch.empty(x.numel() + offset, dtype=x.dtype, device=device)
    buffer[offset:] = x.flatten()
    return buffer[offset:].view(x.shape)


def moment_of(segment: Segment, name: str) -> Moment:
    return segment.moments[segment.algorithm.moment_names.index(name)]


def set_phases(segment: Segment, moment_phase: int, param_phase: int) -> None:
    """Set the phases of the dithers; that of all moments is the same."""
    for moment in segment.moments:
        moment.phase = moment_phase
    segment.param_phase = param_phase


def zero_moment(codec: str | None, rule: MomentRule, grid: BlockGrid, place: Place) -> Moment:
    if codec is None:
        return Moment(shifted(torch.zeros(place.numel), place.offset), phase=MOMENT_PHASE)
    code = CODECS[codec].code_of(rule)
    codes = torch.full((place.numel,), code.zero_code, dtype=torch.uint8)
    values = packed(codes, grid, place.first, code.bits)
    scales = torch.zeros(grid.num_blocks_touched(place.first, place.numel), *code.scale_shape)
    return Moment(shifted(values, place.offset), shifted(scales, place.offset), MOMENT_PHASE)


def int8_rows_of(weights: torch.Tensor, columns: int, scales_dtype: torch.dtype):
    """Return the nearest INT8 codes of whole rows, in one dimension, and their scales."""
    rows = weights.view(-1, columns)
    scales = torch.zeros(len(rows), dtype=scales_dtype)
    if rows.numel():
        scales = int8_rows.new_scales(rows, scales)
    return int8_rows.encoded(rows, scales, None).flatten(), scales


def make(
    codec,
    place,
    scalars,
    param_dtype=torch.float32,
    grad_dtype=torch.float32,
    rounding=Rounding.NEAREST,
    row_scales_dtype=torch.float32,
):
    """Return a segment with random parameters, zero moments and zero gradients.

    The scalars say of which algorithm.  `row_scales_dtype` is for INT8 parameters.
    """
    (algorithm,) = (one for one in ALGORITHMS if one.scalars_type is type(scalars))
    generator = torch.Generator().manual_seed(place.numel)
    grid = place.grid(codec)
    param, row_scales = torch.randn(place.numel, generator=generator), None
    if param_dtype == torch.int8:
        param, row_scales = int8_rows_of(param, math.prod(place.shape[1:]), row_scales_dtype)
        row_scales = shifted(row_scales, place.offset)
    param = param.to(param_dtype)
    return Segment(
        param=shifted(param, place.offset),
        grad=shifted(torch.zeros(place.numel, dtype=grad_dtype), place.offset),
        algorithm=algorithm,
        moments=[zero_moment(codec, rule, grid, place) for rule in algorithm.moments],
        codec=None if codec is None else CODECS[codec],
        grid=grid,
        first=place.first,
        scalars=scalars,
        param_phase=0x7F4A7C15,
        rounding=rounding,
        row_scales=row_scales,
    )


def correct(segment: Segment, correction: torch.Tensor) -> None:
    """Give a segment corrections, int8, and sums of weights that no step has left."""
    offset, numel = segment.param.storage_offset(), segment.param.numel()
    blocks = segment.grid.num_blocks_touched(segment.first, numel)
    segment.correction = shifted(correction.to(torch.int8), offset)
    segment.weight_sums = shifted(torch.zeros(blocks, 2, dtype=torch.int32), offset)


def as_end_of_whole(segment: Segment) -> Segment:
    """Return a copy that holds the whole parameter, of which a segment has the last rows.

    All but these is memory that is not there until it is written to: addresses.
    """
    grid = segment.grid

    def moved(name: str, x: torch.Tensor) -> torch.Tensor:
        size = grid.num_blocks if name.endswith("_scale") else grid.num_rows * grid.row_length
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        whole = torch.frombuffer(mmap.mmap(-1, size * x[0].nbytes, flags), dtype=x.dtype)
        whole = whole.view(size, *x.shape[1:])
        whole[-len(x) :] = x
        return whole

    return replace(mapped(segment, moved), first=0)


def tensors(segment: Segment) -> dict[str, torch.Tensor]:
    """Return everything that a step may change."""
    found = {"param": segment.param}
    for name in ("correction", "weight_sums", "copy", "row_scales"):
        if getattr(segment, name) is not None:
            found[name] = getattr(segment, name)
    for name in segment.algorithm.moment_names:
        moment = moment_of(segment, name)
        found[name] = moment.values
        if moment.scales is not None:
            found[f"{name}_scale"] = moment.scales
    return found


def tensors_by_element(segment: Segment) -> dict[str, torch.Tensor]:
    """Return `tensors`, with a byte for each code."""
    found = tensors(segment)
    if segment.codec is not None:
        for rule in segment.algorithm.moments:
            bits = segment.codec.code_of(rule).bits
            place = segment.grid, segment.first, segment.param.numel()
            found[rule.name] = unpacked(found[rule.name], *place, bits)
    return found


def mapped(segment: Segment, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Segment:
    """Return a copy in which each tensor, whose names are those of `tensors`, is changed."""

    def changed(name: str, x: torch.Tensor | None):
        return None if x is None else change(name, x)

    moments = [
        Moment(changed(name, one.values), changed(f"{name}_scale", one.scales), one.phase)
        for name, one in zip(segment.algorithm.moment_names, segment.moments, strict=True)
    ]
    names = ("param", "grad", "correction", "weight_sums", "copy", "row_scales")
    own = {name: changed(name, getattr(segment, name)) for name in names}
    return replace(segment, **own, moments=moments)


def copied(segment: Segment, device: str = "cpu") -> Segment:
    return mapped(segment, lambda _, x: shifted(x, x.storage_offset(), device))


def framed_copy(segment: Segment) -> tuple[Segment, dict[str, torch.Tensor]]:
    """Return a copy with 100 elements on both sides of what a step may change, and all of these.

    The elements around it are 77.
    """
    frames = {}

    def framed(name: str, value: torch.Tensor) -> torch.Tensor:
        if name == "grad":
            return shifted(value, value.storage_offset())
        frames[name] = torch.full((value.numel() + 200,), 77, dtype=value.dtype)
        return frames[name][100:-100].view(value.shape).copy_(value)

    return mapped(segment, framed), frames


def assert_steps_inside(segment: Segment, expected_step, steppers: dict, label: str) -> None:
    """Step over a segment, and over copies in larger buffers, whose other elements must stay."""
    copies = {name: framed_copy(segment) for name in steppers}
    expected_step([segment])
    for name, (mine, frames) in copies.items():
        steppers[name]([mine])
        assert_same(mine, segment, f"{label}, {name}")
        for what, frame in frames.items():
            assert (frame[:100] == 77).all() and (frame[-100:] == 77).all(), f"{label}: {what}"


def integers(x: torch.Tensor) -> torch.Tensor:
    return x.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


def assert_same(got: Segment, wanted: Segment, label: str) -> None:
    for name, value in tensors(wanted).items():
        other = integers(tensors(got)[name])
        if not torch.equal(other, integers(value)):
            where = (other != integers(value)).flatten().nonzero().flatten()
            raise AssertionError(
                f"{label}: {name} differs at {where[:5].tolist()} of {value.numel()}: got "
                f"{tensors(got)[name].flatten()[where[:5]].tolist()}, expected "
                f"{value.flatten()[where[:5]].tolist()}"
            )


KINDS = 7
EXPONENTS = {4: (-149, 60), 5: (-128, -98), 6: (-66, -48)}


def gradient(kind: int, numel: int, seed: int, dtype=torch.float32) -> torch.Tensor:
    """Return one of seven kinds of gradients, one in ten elements a zero of either sign.

    Gaussian; exact ties; Gaussian with squares that underflow; large; exponents from subnormals to
    2^60, around the smallest scales of m, and around those of v.  What is too large for the dtype
    becomes its largest number.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * {2: 1e-18, 3: 1e15}.get(kind, 1.0)
    if kind == 1:
        x = torch.randint(-8, 9, (numel,), generator=generator) / 8.0
    elif kind in EXPONENTS:
        exponent = torch.randint(*EXPONENTS[kind], (numel,), generator=generator)
        x = torch.ldexp(x.double(), exponent).float()
    zero = torch.rand(numel, generator=generator)
    x = torch.where(zero < 0.05, 0.0, torch.where(zero > 0.95, -0.0, x))
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def factors(count: int, low: int, high: int, seed: int) -> torch.Tensor:
    """Return random floats of both signs, 2^low to 2^high in magnitude."""
    generator = torch.Generator().manual_seed(seed)
    significand = torch.randint(2**23, 2**24, (count,), generator=generator).double()
    sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    exponent = torch.randint(low, high, (count,), generator=generator)
    return torch.ldexp(sign * significand, exponent - 23).float()


def scalars_at(step: int, hyper: dict) -> Scalars:
    """Return the scalars of a step, of Adam unless "algorithm" says another."""
    if "grad_factor" in hyper:
        others = {key: value for key, value in hyper.items() if key != "grad_factor"}
        return scalars_at(step, others)._replace(grad_factor=hyper["grad_factor"])
    algorithm = hyper.get("algorithm", ADAM)
    group, memory = {**algorithm.options, **hyper}, (0.0,) * len(algorithm.memory)
    if "decoupled" in hyper:
        group["decoupled_weight_decay"] = hyper["decoupled"]
    for number in range(1, step + 1):
        memory = algorithm.next_memory(number, memory, group)
    return algorithm.scalars(step, memory, group, hyper.get("bias_correction", True))


def poison_moment(segment: Segment, which: str, value: float) -> int:
    """Put a value into float32 moments, or into a scale; return the number of the block."""
    moment = moment_of(segment, which)
    if segment.codec is None:
        moment.values[800] = value
        return segment.grid.block_of(800)
    block = segment.grid.block_of(600)
    if which == "exp_avg":
        # Then each element is NaN, which maxima lose on AVX-512 and CUDA.
        one = torch.zeros(1)
        moment.values[600:856] = quantize(segment.codec.of_signed, one, one.long(), 1)[0]
    moment.scales.view(moment.scales.shape[0], -1)[block, 0] = value
    return block
