# SPDX-License-Identifier: Apache-2.0
"""The compiled step of INT8 weights against `zero8.spec.reference.step`, bit for bit."""

import kernel_steps
import pytest
import torch
from segments import CODEC_NAMES, Place, assert_steps_inside, gradient, make, scalars_at, set_phases
from test_kernel import assert_follows_reference

from zero8.spec import reference
from zero8.spec.segment import Rounding, Segment

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16, FP16, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
HYPER = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}

# Whole rows: ragged, narrow, shorter than a vector, of several blocks and longer than a part; from
# the middle of a parameter, also beyond 2^32 elements.
PLACES = [
    Place((7, 300), 256, 300, 5 * 300, offset=3),
    Place((40, 17), 64, 6 * 17, 20 * 17, offset=1),
    Place((9, 64), 256, 0, 9 * 64),
    Place((5, 1), 64, 0, 5),
    Place((3, 20_001), 4096, 20_001, 2 * 20_001, offset=2),
    Place((300, 257), 128, 0, 300 * 257),
    Place((2**21, 4100), 256, 2**20 * 4100, 2 * 4100),
    Place((3, 300), 256, 300, 0),
]
DTYPES = {
    "fp32 scales from fp32, dither": (FP32, FP32, Rounding.DITHER),
    "fp32 scales from fp16, nearest": (FP32, FP16, Rounding.NEAREST),
    "fp32 scales from bf16, hash": (FP32, BF16, Rounding.HASH),
    "bf16 scales from fp32, nearest": (BF16, FP32, Rounding.NEAREST),
    "bf16 scales from bf16, dither": (BF16, BF16, Rounding.DITHER),
    "bf16 scales from bf16, hash": (BF16, BF16, Rounding.HASH),
}


def segment_at(place, codec="log", dtypes=(FP32, FP32, Rounding.DITHER)) -> Segment:
    scales, *others = dtypes
    return make(codec, place, scalars_at(1, HYPER), INT8, *others, row_scales_dtype=scales)


def set_step(segment: Segment, step: int, kind: int) -> None:
    segment.grad.copy_(gradient(kind, segment.grad.numel(), 100 * step, segment.grad.dtype))
    segment.scalars = scalars_at(step, HYPER)
    set_phases(segment, 0x9E3779B9 * step % 2**32, 0x7F4A7C15 * step % 2**32)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("codec", CODEC_NAMES, ids=lambda name: name or "fp32")
def test_kernel_step_of_int8_weights_equals_reference(codec, dtypes):
    segments = [segment_at(place, codec, dtypes) for place in PLACES]
    assert_follows_reference(segments, HYPER, 3, kernel_steps.on_every_isa())


@pytest.mark.parametrize("codec", [None, "log"], ids=lambda name: name or "fp32")
def test_kernel_step_of_int8_weights_writes_only_its_own_memory(codec):
    for place in (PLACES[0], PLACES[2]):
        segment = segment_at(place, codec)
        set_step(segment, 1, 0)
        steppers = kernel_steps.on_every_isa()
        assert_steps_inside(segment, lambda ones: reference.step(*ones), steppers, str(place))


@pytest.mark.parametrize("rounding", list(Rounding), ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_kernel_step_of_int8_weights_any_scales_equal_reference(dtype, rounding):
    """Scales from elsewhere: 0, subnormal, of 24 bits, huge, not finite; and the code -128."""
    scales = [0.0, 2.0**-130, 2.0**-126, 1e-30, 0.1, 1 / 3, 1e30, 3.3e38, torch.inf, torch.nan]
    place = Place((len(scales), 300), 256, 0, 300 * len(scales))
    segment = segment_at(place, dtypes=(dtype, FP32, rounding))
    segment.row_scales.copy_(torch.tensor(scales, device="cpu"))
    segment.param[::7] = -128
    assert_follows_reference([segment], HYPER, 2, kernel_steps.on_every_isa())
    assert (segment.row_scales[:8].isfinite()).all() and not segment.row_scales[8:].isfinite().any()
