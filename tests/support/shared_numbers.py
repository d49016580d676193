# SPDX-License-Identifier: Apache-2.0
"""The numbers that are defined both in Python and in C++: a static_assert for each."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zero8.op import codec_maps, structs
from zero8.spec import dither, grid, levels, log, reference
from zero8.spec.algorithm import Algorithm
from zero8.spec.algorithms import ALGORITHMS
from zero8.spec.codec import CODECS, MomentCode
from zero8.spec.dynamic import DynamicCode
from zero8.spec.fp8 import Fp8Code
from zero8.spec.linear4 import Linear4Code
from zero8.spec.log import LogCode, Octaves, SignedLogCode
from zero8.spec.segment import Rounding

# The attributes of codes in zero8/spec, by class, and their names in csrc.
_CODES = {
    Octaves: {
        "shift": "kShift",
        "top": "kTop",
        "min_scale": "kMinScale",
        "least_settling": "kLeastSettling",
    },
    SignedLogCode: {
        "bits": "kBits",
        "zero_code": "kZeroCode",
        "MIN_SCALE": "kMinScale",
        "SAMPLE": "kSample",
        "SAMPLE_OF": "kSampleOf",
    },
    LogCode: {
        "bits": "kBits",
        "zero_code": "kZeroCode",
        "top": "kTop",
        "part_bits": "kPartBits",
        "middle": "kMiddle",
        "MIN_SPAN": "kMinSpan",
        "MAX_SPAN": "kMaxSpan",
        "NORMAL_BITS": "kNormalBits",
        "LOWEST_BITS": "kLowestBits",
    },
    DynamicCode: {"bits": "kBits", "zero_code": "kZeroCode", "min_scale": "kMinScale"},
    Linear4Code: {"bits": "kBits", "zero_code": "kZeroCode", "min_scale": "kMinScale"},
    Fp8Code: {"bits": "kBits", "zero_code": "kZeroCode", "TOP": "kTop", "min_scale": "kMinScale"},
}


def scalars_dtype(algorithm: Algorithm) -> np.dtype:
    """Return the struct of an algorithm's scalars, padded to the longest of all algorithms."""
    names = algorithm.scalars_type._fields
    return np.dtype(
        {
            "names": list(names),
            "formats": ["f4"] * len(names),
            "offsets": [4 * place for place in range(len(names))],
            "itemsize": structs.SCALARS.itemsize,
        }
    )


_WITH_KERNELS = [one for one in ALGORITHMS if one.kernel is one]
_SCALARS = {f"{one.name.capitalize()}Scalars": scalars_dtype(one) for one in _WITH_KERNELS}
_STRUCTS = {
    **_SCALARS,
    "Moment": structs.MOMENT,
    "WeightSums": np.dtype([("all", "u4"), ("without_zeros", "u4")]),
    "Segment": structs.SEGMENT,
    "DynamicMap": structs.DYNAMIC_MAP,
    "Linear4Map": structs.LINEAR4_MAP,
    "CodecMaps": structs.CODEC_MAPS,
    "KeptPiece": structs.KEPT_PIECE,
    "Numbers": structs.NUMBERS,
    "TensorRecord": structs.TENSOR,
}


def assertions(namespace: str, numbers: Mapping[str, float]) -> str:
    """Return C++, to follow the headers, that compiles only if all numbers are Python's.

    Args:
        namespace: the namespace within zero8 of the target that the headers were included for.
        numbers: Python's value of each C++ expression.
    """
    lines = [
        f'static_assert({expression} == {_literal(number)}, "{expression}: Python has {number}");'
        for expression, number in numbers.items()
    ]
    return "\n".join([f"namespace zero8::{namespace} {{", *lines, "}", ""])


def op_source() -> str:
    """Return a C++ file for the op that contains only assertions."""
    headers = '#define ZERO8_TARGET numbers\n#include "check.h"\n#include "vec_scalar.h"\n'
    headers += '#include "moments.h"\n#include "arithmetic.h"\n'
    numbers = shared_numbers() | offsets() | {"kMaxElements": grid.MAX_NUMEL}
    return headers + assertions("numbers", numbers)


def shared_numbers() -> dict[str, float]:
    """Return Python's numbers, by their names in C++."""
    numbers = {
        "kFloat32": structs.FLOAT32_MOMENTS,
        **{f"k{one.name.capitalize()}": one.number for one in CODECS.values()},
        **{f"k{one.name.capitalize()}": one.value for one in Rounding},
        "kFP32": structs.DTYPE_NUMBERS[torch.float32],
        "kBF16": structs.DTYPE_NUMBERS[torch.bfloat16],
        "kFP16": structs.DTYPE_NUMBERS[torch.float16],
        "kINT8": structs.DTYPE_NUMBERS[torch.int8],
        "kWithoutMemory": structs.WITHOUT_MEMORY,
        "kMinBlockSize": grid.MIN_BLOCK_SIZE,
        "kMaxBlockSize": grid.MAX_BLOCK_SIZE,
        "kGradientLimitBits": int(np.float32(reference.GRADIENT_LIMIT).view(np.uint32)),
        "kSaturation": levels.SATURATION,
        "kOneBits": log.ONE_BITS,
        "kMaxHashed": structs.MAX_HASHED,
        "kMaxMoments": structs.MAX_MOMENTS,
        "kNumAlgorithms": len(_WITH_KERNELS) + 1,
        "sizeof(StepScalars)": structs.SCALARS.itemsize,
        "kPieceFactor": codec_maps.PIECE_FACTOR,
        "kPieceShift": codec_maps.PIECE_SHIFT,
        "kElementStep": dither.ELEMENT_STEP,
        "kInBlockStep": dither.IN_BLOCK_STEP,
        "kGoldenStep": dither.GOLDEN_STEP,
        "kRunSteps": dither.RUN_STEPS,
        "kHashFactor1": dither.HASH_FACTORS[0],
        "kHashFactor2": dither.HASH_FACTORS[1],
    }
    for one in CODECS.values():
        for sign, kind in (("of_signed", "true, false"), ("of_unsigned", "false, true")):
            code, name = getattr(one, sign), one.name.capitalize()
            numbers[f"size_of_codec(k{name}).scales_{sign}"] = math.prod(code.scale_shape)
            numbers |= _numbers_of_code(f"In{name}::Code<{kind}>", code)
            if code.bits in (6, 4):
                unit = grid.UNITS[code.bits]
                numbers[f"kUnitCodes<In{name}::Code<{kind}>>"] = unit.numel
                numbers[f"kUnitBytes<In{name}::Code<{kind}>>"] = unit.num_bytes
    for algorithm in _WITH_KERNELS:
        numbers |= _numbers_of_algorithm(algorithm)
    for name, layout in _STRUCTS.items():
        # Structs of scalars are members of a union, as long as the longest of them.
        num_bytes = 4 * len(_fields(layout)) if name in _SCALARS else layout.itemsize
        numbers[f"sizeof({name})"] = num_bytes
        for field, (dtype, *_) in _fields(layout).items():
            numbers[f"sizeof({name}::{field})"] = dtype.itemsize
    return numbers


def offsets() -> dict[str, int]:
    """Return numpy's offsets of structs' fields; NVRTC before 13.5 cannot compile offsetof."""
    return {
        f"__builtin_offsetof({name}, {field})": offset
        for name, layout in _STRUCTS.items()
        for field, (_, offset, *_) in _fields(layout).items()
    }


def _fields(layout: np.dtype) -> Mapping[str, tuple[Any, ...]]:
    assert layout.fields is not None, "a struct has fields"
    return layout.fields


def _numbers_of_code(name: str, code: MomentCode | Octaves) -> dict[str, float]:
    numbers = {f"{name}::{cpp}": getattr(code, attr) for attr, cpp in _CODES[type(code)].items()}
    if isinstance(code, SignedLogCode):
        numbers[f"{name}::kJoint"] = float(code.narrow.levels[code.joint])
        numbers |= _numbers_of_code(f"{name}::Narrow", code.narrow)
        numbers |= _numbers_of_code(f"{name}::Wide", code.wide)
    return numbers


def _numbers_of_algorithm(algorithm: Algorithm) -> dict[str, float]:
    name, moments = f"k{algorithm.name.capitalize()}", f"kMomentsOf[{algorithm.number}]"
    numbers: dict[str, float] = {name: algorithm.number, f"{moments}.count": len(algorithm.moments)}
    for place, rule in enumerate(algorithm.moments):
        numbers[f"{moments}.is_signed[{place}]"] = rule.is_signed
        numbers[f"{moments}.is_dithered[{place}]"] = rule.is_dithered
    return numbers


def _literal(number: float) -> str:
    return number.hex() if isinstance(number, float) else str(int(number))
