# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel of v of rank 1 in tiles, compiled for the host, against the CPU's, bit for bit.

As test_cuda_kernel.py for all other codecs.
"""

import math
import mmap
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from segments import (
    Place,
    assert_same,
    assert_steps_inside,
    copied,
    gradient,
    make,
    moment_of,
    poison_moment,
    scalars_at,
    set_phases,
    tensors,
)
from test_cuda_kernel import (
    ADAMW,
    ADDRESSES_ONLY,
    DTYPES,
    HYPERS,
    assert_follows_cpu,
)
from tile_cases import hyper_of, new_gradient, place_of, segment_of

from zero8.op import kernel
from zero8.op.launch import KERNEL_OF_TILES, Launch
from zero8.spec.segment import Moment, Segment
from zero8.spec.tiles import tiles_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Teams of one warp, of 2, and of 16.
BLOCK_SIZES = [64, 128, 256, 512, 4096]
CASES, STEPS = 40, 2


def random_segment(chance: random.Random) -> tuple[Segment, dict]:
    hyper = hyper_of(chance)
    segment = segment_of(place_of(chance), hyper, chance)
    segment.copy = None  # which is the CPU's alone
    return segment, hyper


def checked(host, number: int) -> int:
    """Take a few steps of a list of random segments; return the blocks left as they were."""
    chance, left = random.Random(number), 0
    cases = [random_segment(chance) for _ in range(chance.choice((1, 1, 2, 5)))]
    segments = [segment for segment, _ in cases]
    mine = [copied(segment) for segment in segments]
    for step in range(1, STEPS + 1):
        for (segment, hyper), ours in zip(cases, mine, strict=True):
            segment.grad.copy_(new_gradient(segment, chance))
            ours.grad.copy_(segment.grad)
            phases = [chance.randrange(2**32) for _ in range(2)]
            for one in (segment, ours):
                one.scalars = scalars_at(step, hyper)
                set_phases(one, *phases)
        wanted = kernel.step(segments)
        got = host.step(mine, backwards=chance.random() < 0.5, grid=chance.choice((1, 2, 3, 50)))
        for index, pair in enumerate(zip(mine, segments, strict=True)):
            assert_same(*pair, f"case {number}, step {step}, segment {index}")
        assert got == wanted
        left += sum(wanted)
    return left


def test_cuda_step_on_tiles_random_cases_equal_the_cpu(host):
    assert sum(checked(host, number) for number in range(CASES)) > CASES


def places(block_size: int) -> list[Place]:
    """Bands, whole and not, narrow and wide, with cut blocks at their ends; one is empty."""
    row = 2 * block_size + 44
    return [
        Place((70, row), block_size, 0, 70 * row),
        Place((6, row), block_size, block_size - 1, 4 * row + 17, offset=1),
        Place((4, row), block_size, 3, 1, offset=2),
        Place((4, row), block_size, 7, 0),
        Place((1, 3 * block_size), block_size, 0, 3 * block_size),
        Place((2**22, 4096), block_size, 5_000_000_000 - 700, 9000, offset=4),
    ]


@pytest.mark.parametrize(
    "block_size",
    [pytest.param(size, marks=[pytest.mark.slow] * (size in (128, 4096))) for size in BLOCK_SIZES],
)
def test_cuda_step_on_tiles_any_dtype_and_place_equals_the_cpu(host, block_size):
    segments = [
        make("shared", place, scalars_at(1, ADAMW), *dtypes)
        for place, dtypes in zip(places(block_size), DTYPES.values(), strict=True)
    ]
    assert_follows_cpu(host, segments, ADAMW, count=2)


@pytest.mark.parametrize("hyper", [one for one in HYPERS.values() if "algorithm" not in one])
def test_cuda_step_on_tiles_any_hyperparameters_equal_the_cpu(host, hyper):
    segments = [
        make(codec, place, scalars_at(1, hyper), dtype)
        for codec in ("shared", None)
        for place in places(64)[:2]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert Launch.of(*kernel.packed(segments)).kernel == KERNEL_OF_TILES
    assert_follows_cpu(host, segments, hyper)


@pytest.mark.parametrize("grid", [1, 2, 7, 10_000])
def test_cuda_step_on_tiles_does_not_depend_on_the_grid(host, grid):
    """Segments of several block sizes, and without codes: teams of the largest serve them all."""
    segments = [
        make(codec, place, scalars_at(1, ADAMW))
        for codec in ("shared", None)
        for block_size in (64, 1024)
        for place in places(block_size)[1:]
    ]
    assert_follows_cpu(host, segments, ADAMW, count=2, grid=grid)


def test_cuda_step_on_tiles_of_equal_columns_has_the_sum_of_4096_levels_of_one(host):
    """It does not fit 32 bits; every sum of a row is 4096 times the same number."""
    segment = make("shared", Place((64, 4096), 4096, 0, 2**18), scalars_at(1, ADAMW))
    segment.grad.fill_(0.5)
    mine = copied(segment)
    kernel.step([segment])
    host.step([mine])
    assert_same(mine, segment, "equal columns")
    assert (moment_of(segment, "exp_avg_sq").values == 255).all()


def after_a_step() -> Segment:
    place = Place((130, 700), 256, 0, 130 * 700)
    segment = make("shared", place, scalars_at(1, ADAMW))
    segment.grad.copy_(gradient(0, place.numel, seed=1))
    kernel.step([segment])
    segment.scalars = scalars_at(2, ADAMW)
    segment.grad.copy_(gradient(0, place.numel, seed=2))
    return segment


@pytest.mark.parametrize("poison", [math.nan, -math.inf, 2.0**63, 2.0**62])
def test_cuda_step_on_tiles_leaves_blocks_of_bad_gradients(host, poison):
    """Of 2^62 the square is a number, but too large for a tile."""
    segment = after_a_step()
    segment.grad[[3, 700 * 70 + 699]] = poison
    mine = copied(segment)
    assert host.step([mine]) == kernel.step([segment]) == [2]
    assert_same(mine, segment, "two blocks")


def test_cuda_step_on_tiles_leaves_the_codes_of_tiles_whose_blocks_are_all_bad(host):
    segment = after_a_step()
    segment.grad.view(130, 700)[:64, 300] = math.inf
    was, mine = copied(segment), copied(segment)
    assert host.step([mine]) == kernel.step([segment]) == [64]
    assert_same(mine, segment, "a tile")
    # Of 64 rows of 11 bytes.
    now, before = (moment_of(one, "exp_avg_sq").values[: 64 * 11] for one in (mine, was))
    same = (now == before).view(64, 11)
    assert same[:, 4:8].all() and not same[:, :4].all()


@pytest.mark.parametrize("which", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_cuda_step_on_tiles_moment_that_is_no_number_leaves_its_block(host, which, value):
    """The CPU's kernel does the same, as its own tests say."""
    segment = after_a_step()
    poison_moment(segment, which, value)
    mine = copied(segment)
    assert host.step([mine]) == kernel.step([segment])
    assert_same(mine, segment, "poisoned")


def test_cuda_step_on_tiles_writes_nothing_beside_its_segment(host):
    """100 elements on both sides; the segments end at each of a thread's elements."""
    for shape in ((3, 300), (70, 65)):
        for numel in (1, 7, 8, 9, 15, 17, 63, 255, 601):
            place = Place(shape, 256, 299, numel)
            segment = make("shared", place, scalars_at(1, ADAMW), torch.bfloat16)
            segment.grad.copy_(gradient(0, numel, seed=numel))
            assert_steps_inside(segment, kernel.step, host.step, f"{shape}, {numel} elements")


def test_cuda_step_on_tiles_beyond_two_to_the_32_elements_is_that_of_any_others(host):
    """The last band of 2^32 + 2^13 elements, in 43 GiB of address space."""
    rows = 2**25 + 64
    end = Place((rows, 128), 128, (rows - 64) * 128, 2**13)
    near = make("shared", end, scalars_at(1, ADAMW))
    near.grad.copy_(gradient(0, end.numel, seed=1))

    def moved(x: torch.Tensor) -> torch.Tensor:
        size = x.shape[0] // 64 * rows
        far = torch.frombuffer(mmap.mmap(-1, size * x[0].nbytes, ADDRESSES_ONLY), dtype=x.dtype)
        far[-len(x) :] = x
        return far

    moments = [Moment(moved(one.values), moved(one.scales), one.phase) for one in near.moments]
    far = replace(near, first=0, param=moved(near.param), grad=moved(near.grad), moments=moments)
    launch = Launch.of(*kernel.packed([far]))
    assert launch.num_tasks == rows // 64
    # As if the list began so far before its first tile that one is left.
    first_tasks = np.array([1 - rows // 64, 1], np.int64)
    host.launch(replace(launch, num_tasks=1), first_tasks=first_tasks.ctypes.data)
    kernel.step([near])
    for name, value in tensors(near).items():
        assert torch.equal(tensors(far)[name][-len(value) :], value), name
    assert not tensors(far)["exp_avg"][:1000].any()


def test_cuda_launch_counts_the_tiles_that_segments_touch():
    chance = random.Random(1)
    found = [place_of(chance) for _ in range(500)]
    found += [place for block_size in BLOCK_SIZES for place in places(block_size)]
    made = partial(make, "shared", scalars=scalars_at(1, ADAMW))
    segments = [made(place) for place in found]
    launch = Launch.of(*kernel.packed(segments))
    first_tasks = launch.table[launch.first_tasks_at : launch.scalars_at].view(np.int64)
    tiles = [tiles_of(one.grid, one.first, one.param.numel()).num_tiles for one in segments]
    assert np.diff(first_tasks).tolist() == tiles
    assert launch.num_tasks == sum(tiles)


def test_cuda_launch_of_tiles_and_of_other_codes_is_not_made():
    place = Place((6, 300), 256, 0, 1800)
    segments = [make(codec, place, scalars_at(1, ADAMW)) for codec in ("shared", "log")]
    with pytest.raises(AssertionError, match="their kernel has no other codecs"):
        Launch.of(*kernel.packed(segments))
