# SPDX-License-Identifier: Apache-2.0
"""A segment: one piece of one parameter, as the kernels and the reference see it."""

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from zero8.spec.algorithm import Algorithm, Scalars
from zero8.spec.codec import Codec
from zero8.spec.grid import BlockGrid


class Rounding(IntEnum):
    """How a bfloat16 or INT8 parameter is rounded after the step; the numbers are the kernels'."""

    NEAREST = 0
    DITHER = 1
    HASH = 2


@dataclass
class Moment:
    """One moment of one segment: codes and block scales, or plain float32 values.

    Attributes:
        values: uint8 codes as `zero8.spec.packing` stores them, or (numel,) float32 values.
        scales: (blocks touched, *code.scale_shape) float32; None for float32 values.
        phase: the phase of its dither (`zero8.spec.dither`).
    """

    values: Tensor
    scales: Tensor | None = None
    phase: int = 0


@dataclass
class Segment:
    """Elements `first .. first + numel - 1` of a parameter, with their gradient and moments.

    All tensors are contiguous, and all but the gradient are updated in place.

    Attributes:
        param: (numel,) float32, bfloat16, or int8 codes of whole rows.
        grad: (numel,) float32 or bfloat16, or float16 unless the parameter is bfloat16.
        algorithm: the algorithm of the step.
        moments: the algorithm's moments, in its order.
        codec: the codec of the moments; None for float32 moments.
        grid: the parameter's block grid; for float32 moments, one row cut into blocks, which then
            only limit the effect of a non-finite gradient.
        first: index in the parameter of the segment's first element.
        scalars: this step's scalars; kernels get them apart from the segments.
        param_phase: the phase of the dither of the parameter's rounding.
        rounding: how a bfloat16 or INT8 parameter is rounded; float32 parameters ignore it.
        correction: (numel,) int8, the 8 bits below those of a bfloat16 parameter, or None.  With it
            the parameter is rounded to 24 bits, to nearest.
        weight_sums: (blocks touched, 2) int32, the sums of the weights by which a step finds
            corrections that belong to others (`zero8.spec.corrections`), 0 before the first step.
            None without: then all belong.
        copy: (numel,) bfloat16 or float16, receives the float32 parameter rounded to nearest, also
            where the step leaves it unchanged, or of bfloat16 the bfloat16 parameter as it is; None
            without.  On the CPU.
        row_scales: (rows,) float32 or bfloat16, the scales of INT8 weights
            (`zero8.spec.int8_rows`), None of others.  On the CPU.
    """

    param: Tensor
    grad: Tensor
    algorithm: Algorithm
    moments: list[Moment]
    codec: Codec | None
    grid: BlockGrid
    first: int
    rounding: Rounding
    scalars: Scalars = None
    param_phase: int = 0
    correction: Tensor | None = None
    weight_sums: Tensor | None = None
    copy: Tensor | None = None
    row_scales: Tensor | None = None
