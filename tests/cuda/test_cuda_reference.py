# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel's source, compiled for the host, against the reference in plain PyTorch."""

import pytest
from segments import CODEC_NAMES, assert_same, copied, make, scalars_at
from test_cuda_kernel import DTYPES, HYPERS, advance, places

from zero8.spec import reference

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("codec", CODEC_NAMES, ids=lambda name: name or "fp32")
@pytest.mark.parametrize("hyper", ["adamw", "l2, maximize"])
def test_cuda_step_any_dtype_and_place_equals_the_reference(host_kernel, codec, hyper):
    segments = [
        make(codec, place, scalars_at(1, HYPERS[hyper]), *dtypes)
        for place in places(256)
        for dtypes in DTYPES.values()
    ]
    mine = [copied(segment) for segment in segments]
    for step in advance(segments, mine, HYPERS[hyper], count=2):
        skipped = host_kernel.step(mine)
        assert skipped == [reference.step(segment) for segment in segments]
        for number, pair in enumerate(zip(mine, segments, strict=True)):
            assert_same(*pair, f"step {step}, segment {number}")
