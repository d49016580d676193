# SPDX-License-Identifier: Apache-2.0
"""Steps under FSDP2 have the bits of one process on plain tensors, also those on GPUs.

Parameters are there or in page-locked memory.
"""

import pytest
import torch
from fsdp_worker import LAYOUTS, accumulated, clipped, differing, trained

CASES = [
    *((layout, size, 4, "after the backward") for layout in LAYOUTS for size in (2, 3)),
    *((layout, 2, 4, "in the backward") for layout in ("offload", "corrected")),
    ("corrected", 2, 3, "Accelerate"),
    ("bfloat16", 2, 3, "moved"),
    ("bfloat16", 2, 3, "DDP"),
]
ROWS = [
    pytest.param(*case, "cpu", marks=[pytest.mark.slow] * (case[1] == 3 and case[0] != "corrected"))
    for case in CASES
] + [
    pytest.param(layout, size, 4, way, "cuda", marks=pytest.mark.gpu)
    for layout in LAYOUTS
    for way in ("after the backward", "in the backward")
    for size in sorted({1, max(1, torch.cuda.device_count())})
]


@pytest.mark.parametrize(("layout", "size", "steps", "way", "device"), ROWS)
def test_fsdp2_step_has_the_bits_of_one_process(layout, size, steps, way, device, standing_ranks):
    expected = trained(layout, steps, "alone")
    for got in standing_ranks(size, device).run(trained, layout=layout, steps=steps, way=way):
        assert differing(got, expected, *[size] * (way != "DDP")) == []


def test_fsdp2_step_in_the_backward_of_the_last_micro_batch_has_the_bits_of_one_after_it(
    standing_ranks,
):
    run = standing_ranks(2).run
    expected = run(accumulated, layout="offload", in_backward=False)
    for ours, theirs in zip(
        run(accumulated, layout="offload", in_backward=True), expected, strict=True
    ):
        assert differing(ours, theirs) == []


@pytest.mark.parametrize("layout", ["offload", "bfloat16"])
def test_fsdp2_step_with_a_clipped_norm_has_the_bits_of_torchs_clipping(layout, standing_ranks):
    """torch adds n squares in float32, and returns bfloat16 for bfloat16."""
    run = standing_ranks(2).run
    (ours, norms), (others, norms_there) = run(clipped, layout=layout)
    assert norms == norms_there and all(norm > 0.5 for norm in norms)
    numel = sum(entry["values"].numel() for entry in ours.values())
    torchs_error = 2**-7 if layout == "bfloat16" else numel * 2**-25
    results = zip((ours, others), run(clipped, layout=layout, by_norms=norms), strict=True)
    for mine, (theirs, torchs_norms) in results:
        assert differing(mine, theirs) == []
        for norm, torchs in zip(norms, torchs_norms, strict=True):
            assert norm.item() == pytest.approx(torchs.item(), rel=torchs_error)
