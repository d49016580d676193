# SPDX-License-Identifier: Apache-2.0
"""Python and C++ have the same structs; numbers that differed would change the bits of steps."""

import subprocess

import numpy as np
from test_csrc import COMPILER

from zero8.op import structs

STRUCTS = {
    "Moment": structs.MOMENT,
    "Segment": structs.SEGMENT,
    "DynamicMap": structs.DYNAMIC_MAP,
    "Linear4Map": structs.LINEAR4_MAP,
    "CodecMaps": structs.CODEC_MAPS,
    "KeptPiece": structs.KEPT_PIECE,
    "Numbers": structs.NUMBERS,
    "TensorRecord": structs.TENSOR,
}


def assertions(name: str, layout: np.dtype) -> list[str]:
    numbers = {f"sizeof({name})": layout.itemsize}
    for field, (dtype, offset, *_) in (layout.fields or {}).items():
        numbers[f"sizeof({name}::{field})"] = dtype.itemsize
        numbers[f"__builtin_offsetof({name}, {field})"] = offset
    return [f'static_assert({one} == {number}, "{number}");' for one, number in numbers.items()]


def test_structs_of_the_op_are_those_of_python(tmp_path):
    lines = ['#include "host.h"', "namespace zero8 {"]
    lines += [line for pair in STRUCTS.items() for line in assertions(*pair)]
    source = tmp_path / "structs.cpp"
    source.write_text("\n".join([*lines, "}", ""]))
    done = subprocess.run([*COMPILER, "-fsyntax-only", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
