# SPDX-License-Identifier: Apache-2.0
"""What every call of a kernel checks of its records, whoever made them: csrc/check.cpp."""

import kernel_steps
import numpy as np
import pytest
import torch
from segments import Place, assert_same, copied, make, scalars_at

from zero8.op import kernel
from zero8.op.cuda import Launch
from zero8.spec.codec import CODECS

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
# Two rows of 256 + 44 elements: four blocks, of which the segment touches three.
PLACE = Place((2, 300), 256, 200, 300)
FP32, BF16, FP16, INT8 = range(4)

OUTSIDE_INT32 = [-(2**31), -1, 2**31 - 1]
BAD = {
    "block_size": [*OUTSIDE_INT32, 0, 1, 32, 63, 65, 255, 300, 4097, 8192, 65536],
    "row_length": [-(2**63), -1, 0, 2**48 + 1, 2**62, 2**63 - 1],
    "own_row_length": [-(2**63), -1, 0, 299, 301, 2**63 - 1],
    "numel": [-(2**63), -1, 2**48 + 1, 2**63 - 1],
    "first": [-(2**63), -1, 2**48 - 299, 2**63 - 1],
    "algorithm": [*OUTSIDE_INT32, 0, 10],  # 5 to 9 convert one moment
    "param_dtype": [*OUTSIDE_INT32, FP16, 4],
    "grad_dtype": [*OUTSIDE_INT32, 3],
    "rounding": [*OUTSIDE_INT32, 3],
    "scalars": [*OUTSIDE_INT32, 1],
    "param": [0, 2, 3],
    "grad": [0, 2, 3],
}
# By moment and field; the codec 0 or 1 of one moment alone is none of both.
BAD_OF_MOMENTS = {
    (0, "codec"): [*OUTSIDE_INT32, 2, 3, 8],
    (1, "codec"): [*OUTSIDE_INT32, 0, 1, 2, 3, 5, 6, 7, 8],
    (0, "num_scales"): [-1, 0, 2, 4, 2**63 - 1],
    (1, "num_scales"): [-1, 0, 3, 5, 7, 2**63 - 1],
    (0, "values"): [0],
    (1, "values"): [0],
    (0, "scales"): [0, 2],
    (1, "scales"): [0, 2],
}


def segment(codec="log", dtype=torch.float32):
    made = make(codec, PLACE, scalars_at(1, ADAMW), dtype)
    made.grad.fill_(0.5)
    return made


def step_on_the_cpu(records, scalars):
    kernel_steps.run(records, scalars, 1, kernel.default_isa())


RUNS = {"cpu": step_on_the_cpu, "cuda": Launch.of}


def test_record_of_a_conversion_of_float32_moments_is_refused():
    records, scalars = kernel_steps.packed([segment()])
    records["algorithm"], records["moments"]["codec"] = 5, 0
    with pytest.raises(ValueError, match="algorithm: got 5, which no kernel takes"):
        step_on_the_cpu(records, scalars)


def int8_segment():
    """Whole rows of INT8 weights."""
    made = make("log", Place((9, 300), 256, 300, 600), scalars_at(1, ADAMW), torch.int8)
    made.grad.fill_(0.5)
    return made


def test_record_of_int8_weights_is_refused_by_a_kernel_that_does_not_take_them():
    packed = kernel_steps.packed([made := int8_segment()])
    assert made.row_scales is not None
    with pytest.raises(ValueError, match="param_dtype: got 3, which"):
        Launch.of(*packed)


def copied_segment():
    made = segment()
    made.copy = torch.zeros(PLACE.numel, dtype=torch.float16)
    return made


BAD_OF_INT8 = {
    "row_scales_dtype": [*OUTSIDE_INT32, FP16, INT8],
    "row_scales": [0, 2],
    "own_row_length": [2**31],
    "first": [299, 301],
    "numel": [299, 301],
    "row_length": [600],
    "copy": [2],
}
# Beside a float16 copy of a float32 parameter.
BAD_OF_COPY = {"copy_dtype": [*OUTSIDE_INT32, FP32, INT8], "copy": [3], "param_dtype": [BF16]}
ROWS = [
    *((run, "float", (f,), v) for run in RUNS for f, vs in BAD.items() for v in vs),
    *((run, "float", at, v) for run in RUNS for at, vs in BAD_OF_MOMENTS.items() for v in vs),
    *(("cpu", "int8", (f,), v) for f, vs in BAD_OF_INT8.items() for v in vs),
    *(("cpu", "copied", (f,), v) for f, vs in BAD_OF_COPY.items() for v in vs),
]


@pytest.mark.parametrize(("run", "kind", "place", "value"), ROWS, ids=str)
def test_record_with_a_bad_field_is_refused_by_its_name_and_changes_nothing(
    run, kind, place, value
):
    made = {"float": [segment(), segment()], "int8": [int8_segment()], "copied": [copied_segment()]}
    made = made[kind]
    before = [copied(one) for one in made]
    records, scalars = kernel_steps.packed(made)
    *moment, field = place
    numbers = records["moments"][field][-1:, moment[0]] if moment else records[field][-1:]
    if kind == "int8" and field == "own_row_length":  # which divides the length of rows
        records["row_length"] = 2**32
    if field == "copy" and kind == "int8":
        records["copy_dtype"] = BF16
    if field in ("param", "grad", "scales", "row_scales", "copy") and value:
        value += int(numbers[0])  # an address that is no multiple of the element's size
    numbers[0] = value
    name = {"num_scales": "scales"}.get(field, field)
    name = "copy_dtype" if (kind, field) == ("copied", "param_dtype") else name
    name = rf"moments\[{moment[0]}\].{name}" if moment else name
    with pytest.raises(ValueError, match=f"^zero8: segment {len(made) - 1}: {name}: got"):
        RUNS[run](records, scalars)
    for one, was in zip(made, before, strict=True):
        assert_same(one, was, "unchanged")


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_record_whose_fields_exclude_each_other_is_refused(run):
    records, scalars = kernel_steps.packed([segment(dtype=torch.bfloat16)])
    records["grad_dtype"] = FP16
    with pytest.raises(ValueError, match="grad_dtype: got 2"):
        run(records, scalars)
    records, scalars = kernel_steps.packed([segment()])
    records["correction"] = records["moments"]["values"][:, 0]
    with pytest.raises(ValueError, match="param_dtype: got 0, which"):
        run(records, scalars)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("codec", [None, *CODECS])
def test_record_of_an_empty_segment_needs_no_memory(run, codec):
    made = make(codec, Place((2, 300), 256, 50, 0), scalars_at(1, ADAMW))
    records, scalars = kernel_steps.packed([made])
    records["param"] = records["grad"] = 0
    records["moments"]["values"] = records["moments"]["scales"] = 0
    run(records, scalars)


@pytest.mark.parametrize("name", ["segments", "scalars"])
def test_records_that_do_not_lie_in_a_row_are_refused(name):
    records, scalars = kernel_steps.packed([segment(), segment()])
    given = {"segments": records, "scalars": np.concatenate([scalars, scalars])}
    given[name] = np.repeat(given[name], 2)[::2]
    with pytest.raises(ValueError, match="records"):
        step_on_the_cpu(*given.values())
