# SPDX-License-Identifier: Apache-2.0
"""Parameters of narrow rows, whose blocks are groups of rows: steps, shards, requantization."""

import math
from functools import partial

import kernel_steps
import pytest
import torch
from moment_samples import MOMENTS, spread_values
from segments import (
    Place,
    assert_same,
    assert_steps_inside,
    copied,
    gradient,
    make,
    moment_of,
    scalars_at,
    stepped_parts,
    tensors_by_element,
)
from test_kernel import assert_follows_reference, follow, steps

from zero8.op import kernel
from zero8.spec import reference
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, dequantize, quantize
from zero8.spec.grid import BlockGrid
from zero8.spec.segment import Rounding

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16 = torch.float32, torch.bfloat16
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
codecs = pytest.mark.parametrize("codec", CODECS)

# Whole parameters, most of whose last groups are short, and parts of others.
PLACES = [
    Place((300, 8), 256, 0, 2400),
    Place((1000, 1), 256, 0, 1000, offset=1),
    Place((41, 63), 256, 0, 41 * 63, offset=3),
    Place((40, 1, 3, 3), 64, 0, 360),
    Place((3, 5), 4096, 0, 15),
    Place((100, 40), 64, 7, 81),
    Place((900, 5), 4096, 4090, 12, offset=2),
    Place((900, 5), 256, 250, 11),
    Place((300, 8), 256, 100, 0),
    Place((2**31, 3), 256, 5_000_000_000 - 700, 1000),
]


@codecs
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_kernel_step_over_groups_of_rows_equals_reference(codec, dtype):
    scalars = scalars_at(1, ADAMW)
    segments = [make(codec, p, scalars, dtype, dtype, Rounding.DITHER) for p in PLACES]
    assert_follows_reference(segments, ADAMW, count=3, num_threads=2)


@codecs
def test_cuda_step_over_groups_of_rows_equals_the_cpu(host_kernel, codec):
    """The kernel for GPUs, compiled for the host, and its list of blocks."""
    segments = [make(codec, place, scalars_at(1, ADAMW)) for place in PLACES]
    mine = [copied(segment) for segment in segments]
    for step in steps(segments, ADAMW, 3):
        for ours, theirs in zip(mine, segments, strict=True):
            follow(ours, theirs)
        assert host_kernel.step(mine) == kernel_steps.step(segments)
        for number, pair in enumerate(zip(mine, segments, strict=True)):
            assert_same(*pair, f"step {step}, segment {number}")


@codecs
def test_kernel_step_over_a_short_group_writes_nothing_beside_its_segment(codec):
    place = Place((60, 5), 256, 0, 300)  # groups of 51 and of 9 rows
    for isa in kernel.isas():
        segment = make(codec, place, scalars_at(1, ADAMW))
        segment.grad.copy_(gradient(0, place.numel, seed=1))
        step = partial(kernel_steps.step, isa=isa)
        assert_steps_inside(segment, step, step, isa)


@codecs
@pytest.mark.parametrize("element", [0, 255, 256, 2304, 2399])
def test_kernel_step_nonfinite_gradient_stops_its_group_of_rows_only(codec, element):
    """Groups of 32 rows of 8; the last has 12."""
    segment = make(codec, PLACES[0], scalars_at(1, ADAMW))
    segment.grad.fill_(1.0)
    segment.grad[element] = math.nan
    following, before = copied(segment), segment.param.clone()
    assert kernel_steps.step([segment]) == [1] and reference.step(following) == 1
    assert_same(segment, following, "reference")
    same = (segment.param == before).nonzero().flatten().tolist()
    group = element // 256
    assert same == list(range(256 * group, min(256 * group + 256, 2400)))


# --- Shards --------------------------------------------------------------------------------------

# Groups of 21 rows of 12, which are 252 elements, and a last one of 16 rows.
WHOLE = Place((100, 12), 256, 0, 1200)
CUTS = {
    "between two groups": ([504], set()),
    "between all groups": ([252, 504, 756, 1008], set()),
    "between two rows of a group": ([504 + 12 * 10], {2}),
    "inside a row": ([300], {1}),
    "in the short group": ([1008 + 36], {4}),
    "one element": ([700, 701], {2}),
}
STEPPERS = {
    "kernel": kernel_steps.step,
    "reference": lambda segments: [reference.step(segment) for segment in segments],
}
both_steppers = pytest.mark.parametrize("stepper", STEPPERS.values(), ids=STEPPERS)
all_cuts = pytest.mark.parametrize(("cuts", "cut_blocks"), CUTS.values(), ids=CUTS)


@both_steppers
@all_cuts
@codecs
def test_step_over_shards_keeps_the_bits_of_groups_that_no_boundary_cuts(
    codec, cuts, cut_blocks, stepper
):
    (whole,) = stepped_parts(codec, WHOLE, [], BF16, ADAMW, stepper, steps=4)
    block = torch.arange(WHOLE.numel) // 252
    for part in stepped_parts(codec, WHOLE, cuts, BF16, ADAMW, stepper, steps=4):
        here = block[part.first : part.first + part.grad.numel()]
        blocks = here.unique().tolist()
        uncut = torch.tensor([number not in cut_blocks for number in blocks])
        assert uncut.any() or len(blocks) == 1
        for name, value in tensors_by_element(part).items():
            if name.endswith("scale"):
                mask, expected = uncut, tensors_by_element(whole)[name][blocks]
            else:
                mask = uncut[here - blocks[0]]
                expected = tensors_by_element(whole)[name][
                    part.first : part.first + part.grad.numel()
                ]
            assert torch.equal(value[mask], expected[mask]), name


def decoded_and_widths(code, codes, scales, block):
    """Return what a moment decodes to, and for each element the wider of the gaps beside its code.

    Gaps are those between all numbers that a code may stand for in the element's block.
    """
    x = dequantize(code, codes, scales, block)
    num_blocks, num_codes = len(scales), 2**code.bits
    every_code = torch.arange(num_codes, dtype=torch.uint8).repeat(num_blocks)
    of_block = torch.arange(num_blocks).repeat_interleave(num_codes)
    levels = dequantize(code, every_code, scales, of_block).view(num_blocks, num_codes)
    distance = levels[block] - x[:, None]
    above = torch.where(distance > 0, distance, math.inf).amin(1)
    below = torch.where(distance < 0, -distance, math.inf).amin(1)
    gaps = torch.stack([above, below])
    return x, torch.where(gaps.isinf(), 0.0, gaps).amax(0)


@both_steppers
@all_cuts
@codecs
def test_step_over_shards_is_within_a_code_where_a_boundary_cuts_a_group(
    codec, cuts, cut_blocks, stepper
):
    """The first moments of the first step are .1 g, the second .001 g^2: six roundings at most."""
    exact = {"exp_avg": 0.1 * gradient(0, WHOLE.numel, seed=1)}
    exact["exp_avg_sq"] = 0.1 * exact["exp_avg"].square()
    for part in stepped_parts(codec, WHOLE, cuts, BF16, ADAMW, stepper, steps=1):
        numel = part.grad.numel()
        block, num_blocks = part.grid.block_numbers(part.first, numel)
        assert num_blocks == len(moment_of(part, "exp_avg").scales)
        for which in MOMENTS:
            code = CODECS[codec].code_of(ADAM.moment(which))
            codes, scales = tensors_by_element(part)[which], moment_of(part, which).scales
            x, width = decoded_and_widths(code, codes, scales, block)
            expected = exact[which][part.first : part.first + numel]
            slack = 6 * 2.0**-24 * expected.abs()
            assert ((x - expected).abs() <= width + slack).all(), which


# --- Requantization ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("which", MOMENTS)
@codecs
def test_quantize_over_groups_of_rows_what_was_decoded_gives_the_same_codes(codec, which, place):
    code, grid = (
        CODECS[codec].code_of(ADAM.moment(which)),
        BlockGrid.of(place.shape, place.block_size),
    )
    block, num_blocks = grid.block_numbers(place.first, place.numel)
    for seed in range(5):
        x = spread_values(which, place.numel, seed)
        codes, scales = quantize(code, x, block, num_blocks)
        decoded = dequantize(code, codes, scales, block)
        again = quantize(code, decoded, block, num_blocks)
        assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
