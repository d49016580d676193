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

# The constants of modules, and the attributes of codes by class; `_in_cpp` has their names there.
_CONSTANTS = {
    structs: "WITHOUT_MEMORY MAX_HASHED MAX_MOMENTS",
    grid: "MIN_BLOCK_SIZE MAX_BLOCK_SIZE",
    levels: "SATURATION",
    log: "ONE_BITS",
    codec_maps: "PIECE_FACTOR PIECE_SHIFT",
    dither: "ELEMENT_STEP IN_BLOCK_STEP GOLDEN_STEP RUN_STEPS",
}
_CODES = {
    Octaves: "shift top min_scale least_settling",
    SignedLogCode: "bits zero_code MIN_SCALE SAMPLE SAMPLE_OF",
    LogCode: "bits zero_code top part_bits middle MIN_SPAN MAX_SPAN NORMAL_BITS LOWEST_BITS",
    DynamicCode: "bits zero_code min_scale",
    Linear4Code: "bits zero_code min_scale",
    Fp8Code: "bits zero_code TOP min_scale",
}
_DTYPES = {
    "FP32": torch.float32,
    "BF16": torch.bfloat16,
    "FP16": torch.float16,
    "INT8": torch.int8,
}


def _in_cpp(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))


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
    numbers: dict[str, float] = {
        "kFloat32": structs.FLOAT32_MOMENTS,
        "kGradientLimitBits": int(np.float32(reference.GRADIENT_LIMIT).view(np.uint32)),
        "kNumAlgorithms": len(_WITH_KERNELS) + 1,
        "sizeof(StepScalars)": structs.SCALARS.itemsize,
        "kHashFactor1": dither.HASH_FACTORS[0],
        "kHashFactor2": dither.HASH_FACTORS[1],
        **{_in_cpp(one.name): one.number for one in CODECS.values()},
        **{_in_cpp(one.name): one.value for one in Rounding},
        **{f"k{name}": structs.DTYPE_NUMBERS[dtype] for name, dtype in _DTYPES.items()},
    }
    for module, names in _CONSTANTS.items():
        numbers |= {_in_cpp(name): getattr(module, name) for name in names.split()}
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
    names = _CODES[type(code)].split()
    numbers = {f"{name}::{_in_cpp(one)}": getattr(code, one) for one in names}
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
