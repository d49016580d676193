# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel, compiled for the host, against the CPU's kernel, bit for bit.

It is the whole kernel: thread blocks, tails, alignment, the search for segments, reductions.  What
the host cannot show is how a GPU rounds; the instructions are looked at in test_cuda_compile.py.
"""

import ctypes
import math
import mmap
from dataclasses import replace
from pathlib import Path

import halves
import kernel_steps
import numpy as np
import pytest
import torch
from adaptive_samples import near_joint
from host_kernel import Host
from places import FOLDERS
from segments import (
    CODEC_NAMES,
    DTYPES,
    KINDS,
    Place,
    as_end_of_whole,
    assert_same,
    assert_steps_inside,
    copied,
    correct,
    factors,
    gradient,
    make,
    moment_of,
    scalars_at,
    set_phases,
    tensors,
)
from segments import HYPERS as OF_THE_CPU

from zero8.op.cuda import Launch
from zero8.spec import arithmetic as ieee
from zero8.spec.lion import LION
from zero8.spec.segment import Moment, Rounding, Segment
from zero8.spec.sgd import SGD

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
codec_names = pytest.mark.parametrize("codec", CODEC_NAMES, ids=lambda name: name or "fp32")

# Teams of 8 and 16 threads (parts of a warp), of one warp, of 2, and of 16.
BLOCK_SIZES = [64, 128, 256, 512, 4096]

# Of the CPU's, and scalars that a GPU might flush.
OF_CPU = (
    *("adamw", "exact betas", "factor, l2, maximize", "no memory", "long beta1"),
    *("lion", "ademamix", "sgd", "sgd, nesterov, decoupled, maximize, factor"),
)
HYPERS = {name: OF_THE_CPU[name] for name in OF_CPU} | {
    "subnormal scalars": {"lr": 1e-40, "betas": (1e-30, 0.9), "eps": 1e-40, "weight_decay": 0.1},
    "large rate": {"lr": 2.0**119, "betas": (0.9, 0.999), "eps": 1.0, "weight_decay": 0.0},
    "lion, subnormal scalars": {"algorithm": LION, "lr": 1e-40, "betas": (1e-30, 0.9)},
    "sgd, subnormal scalars": {"algorithm": SGD, "lr": 1e-40, "momentum": 1e-30},
}
ADAMW, L2 = HYPERS["adamw"], HYPERS["factor, l2, maximize"]
# Makes normal numbers of subnormal parameters, if they are not flushed first.
HEAVY_L2 = {**ADAMW, "weight_decay": 2.0**40, "decoupled": False}


def places(block_size: int) -> list[Place]:
    """Segments of whole and of cut blocks, aligned and not, one of them empty."""
    row = 2 * block_size + 44
    return [
        Place((9, row), block_size, 0, 9 * row),
        Place((4, row), block_size, block_size - 1, 2 * row + 17, offset=1),
        Place((4, row), block_size, 3, 1, offset=2),
        Place((4, row), block_size, 7, 0),
        Place((3, 4 * block_size), block_size, 0, 12 * block_size),
        Place((2**22, 4096), block_size, 5_000_000_000 - 700, 1000, offset=4),
        Place((300, 8), block_size, 0, 2400),
        Place((41, 63), block_size, 0, 41 * 63, offset=3),
    ]


def advance(segments: list[Segment], mine: list[Segment], hyper: dict, count: int):
    """Give both lists the gradients, scalars and phases of each step in turn."""
    for step in range(1, count + 1):
        for number, (theirs, ours) in enumerate(zip(segments, mine, strict=True)):
            numel, kind = theirs.grad.numel(), (number + step) % KINDS
            grad = gradient(kind, numel, 100 * step + number, theirs.grad.dtype)
            for one in (theirs, ours):
                one.grad.copy_(grad)
                one.scalars = scalars_at(step, hyper)
                phases = (factor * step + number for factor in (1000, 2000))
                set_phases(one, *(phase * 0x9E3779B9 % 2**32 for phase in phases))
        yield step


def assert_follows_cpu(host: Host, segments: list[Segment], hyper: dict, count=3, **options):
    mine = [copied(segment) for segment in segments]
    for step in advance(segments, mine, hyper, count):
        wanted = kernel_steps.step(segments)
        got = host.step(mine, backwards=step % 2 == 0, **options)
        for number, pair in enumerate(zip(mine, segments, strict=True)):
            assert_same(*pair, f"step {step}, segment {number}")
        assert got == wanted


@codec_names
@pytest.mark.parametrize(
    "block_size",
    [pytest.param(size, marks=[pytest.mark.slow] * (size in (128, 4096))) for size in BLOCK_SIZES],
)
def test_cuda_step_any_dtype_and_place_equals_the_cpu(host, codec, block_size):
    segments = [
        make(codec, place, scalars_at(1, ADAMW), *dtypes)
        for place in places(block_size)
        for dtypes in DTYPES.values()
    ]
    assert_follows_cpu(host, segments, ADAMW)


@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
def test_cuda_step_any_hyperparameters_equal_the_cpu(host, hyper):
    segments = [
        make(codec, place, scalars_at(1, hyper), dtype, FP32, Rounding.DITHER)
        for codec in CODEC_NAMES
        for place in places(256)[:3]
        for dtype in (FP32, BF16)
    ]
    assert_follows_cpu(host, segments, hyper)


@pytest.mark.parametrize("grid", [1, 2, 7, 10_000])
def test_cuda_step_one_launch_over_all_kinds_does_not_depend_on_the_grid(host, grid):
    """Segments of all codecs, dtypes and block sizes: teams of the largest serve them all."""
    segments = [
        make(codec, place, scalars_at(1, L2), *dtypes)
        for number, codec in enumerate(CODEC_NAMES)
        for block_size in (64, 256, 1024)
        for place, dtypes in zip(
            places(block_size), list(DTYPES.values())[number:] + list(DTYPES.values()), strict=False
        )
    ]
    assert_follows_cpu(host, segments, L2, count=2, grid=grid)


@pytest.mark.parametrize("block_size", [64, 256, 1024])
def test_cuda_step_log_blocks_between_narrow_and_wide_equal_the_cpu(host, block_size):
    """Where a sum over the whole block decides."""
    place = Place((20, 2 * block_size), block_size, 0, 40 * block_size)
    segment = make("log", place, scalars_at(1, HYPERS["no memory"]))
    largest = torch.exp2(torch.linspace(0.0, 1.0, 40))
    segment.grad.copy_(near_joint(largest, block_size, seed=2).flatten())
    mine = copied(segment)
    kernel_steps.step([segment])
    host.step([mine])
    assert_same(mine, segment, f"blocks of {block_size}")
    assert 0.2 < (moment_of(segment, "exp_avg").scales < 0).float().mean() < 0.8


@codec_names
@pytest.mark.parametrize("grad_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("hyper", [ADAMW, HEAVY_L2], ids=["adamw", "heavy l2"])
def test_cuda_step_with_a_correction_equals_the_cpu(host, codec, grad_dtype, hyper):
    segments = [make(codec, place, scalars_at(1, ADAMW), BF16, grad_dtype) for place in places(256)]
    for segment in segments:
        numel = segment.param.numel()
        correct(segment, torch.arange(numel))
        segment.param[::5] = 0.0  # which have no correction
    assert_follows_cpu(host, segments, hyper)
    for value in (0.0, 0.0, 1.5):  # the second time, blocks keep the corrections of other weights
        for segment in segments:
            segment.param[::5] = 0.0
            segment.param[300:700:3] = value
        assert_follows_cpu(host, segments, hyper, count=1)


POISON = {"nan": math.nan, "-nan": -math.nan, "inf": math.inf, "2^63": 2.0**63}


@codec_names
@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
@pytest.mark.parametrize("block_size", [64, 256, 4096])
def test_cuda_step_nonfinite_gradient_leaves_its_block_as_it_was(host, codec, poison, block_size):
    """The CPU's kernel does the same, as its own tests say."""
    hyper = L2 if math.isinf(poison) else ADAMW
    segments = [make(codec, place, scalars_at(1, hyper)) for place in places(block_size)]
    mine = [copied(segment) for segment in segments]
    for _ in advance(segments, mine, hyper, 2):
        for number, pair in enumerate(zip(segments, mine, strict=True)):
            for one in pair:
                one.grad[number :: 3 * block_size + 1] = poison
        before = copied(segments[0])
        wanted = kernel_steps.step(segments)
        assert host.step(mine) == wanted
        assert wanted[0] > 1
        assert (segments[0].param == before.param).any()
        assert (segments[0].param != before.param).any()
        for number, pair in enumerate(zip(mine, segments, strict=True)):
            assert_same(*pair, f"segment {number}")


@pytest.mark.parametrize("row_length", halves.ROW_LENGTHS)
def test_cuda_step_every_half_steps_as_the_same_number_in_float32_on_the_cpu(host, row_length):
    """NaN and infinity leave their blocks as they were, as the CPU's tests say."""
    beyond = halves.among_finite(halves.BEYOND, row_length).flatten()
    for grad, nonfinite in ((halves.FINITE, 0), (beyond, 2 * 2048)):
        half, wide = halves.segments_of(None, grad, row_length, ADAMW)
        assert host.step([half]) == kernel_steps.step([wide]) == [nonfinite]
        assert_same(half, wide, f"rows of {row_length}")


@codec_names
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_cuda_step_writes_nothing_beside_its_segment(host, codec, dtype):
    """100 elements on both sides; the segments end at each of a thread's elements."""
    for numel in (1, 7, 8, 9, 15, 16, 17, 31, 33, 255):
        place = Place((3, 300), 256, 296, numel)
        segment = make(codec, place, scalars_at(1, ADAMW), dtype)
        segment.grad.copy_(gradient(0, numel, seed=numel))
        assert_steps_inside(segment, kernel_steps.step, host.step, f"{numel} elements")


def at_the_end(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x behind which memory ends."""
    page = 65536
    used = -(-x.nbytes // page) * page
    memory = mmap.mmap(-1, used + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + used), page, 0) == 0
    offset = used - x.nbytes
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset)
    return copy.view(x.shape).copy_(x)


def step_at_the_end_of_memory(folder: str) -> None:
    """Of segments that end at each of a thread's elements."""
    host = Host(Path(folder))
    for codec in CODEC_NAMES:
        for dtypes in DTYPES.values():
            for numel in (1, 7, 8, 9, 15, 31, 255, 256, 300):
                place = Place((3, 300), 256, 0, numel)
                segment = make(codec, place, scalars_at(1, ADAMW), *dtypes)
                segment.grad.copy_(gradient(0, numel, seed=numel))
                moments = [
                    Moment(
                        at_the_end(moment.values),
                        None if codec is None else at_the_end(moment.scales),
                        moment.phase,
                    )
                    for moment in segment.moments
                ]
                ends = {name: at_the_end(getattr(segment, name)) for name in ("param", "grad")}
                mine = replace(segment, **ends, moments=moments)
                kernel_steps.step([segment])
                host.step([mine])
                assert_same(mine, segment, f"{codec}, {dtypes}, {numel} elements")
    print("stepped")


def test_cuda_step_reads_nothing_beyond_its_segment(forks, host):
    """In a process of its own, which ends if it does."""
    folder = str(host.path.parent)  # where it is compiled already
    code = f"import test_cuda_kernel; test_cuda_kernel.step_at_the_end_of_memory({folder!r})"
    done = forks.run(f"import sys; sys.path[:0] = {FOLDERS!r}; {code}")
    assert done.returncode == 0 and "stepped" in done.stdout, done.stderr


def test_cuda_step_blocks_beyond_two_to_the_32_elements_are_stepped_like_any_others(host):
    """The last two blocks of 2^32 + 768 elements, in 43 GiB of address space."""
    rows = 2**25 + 6
    end = Place((rows, 128), 128, (rows - 2) * 128, 256)
    near = make("log", end, scalars_at(1, ADAMW))
    near.grad.copy_(gradient(0, 256, seed=1))
    far = as_end_of_whole(near)
    launch = Launch.of(*kernel_steps.packed([far]))
    assert launch.num_blocks == rows
    # As if the list began so far before its first block that two are left.
    first_blocks = np.array([2 - rows, 2], np.int64)
    host.launch(replace(launch, num_blocks=2), first_blocks=first_blocks.ctypes.data)
    kernel_steps.step([near])
    for name, value in tensors(near).items():
        assert torch.equal(tensors(far)[name][-len(value) :], value), name
    assert not tensors(far)["exp_avg"][:1000].any()


# --- Flush to zero -------------------------------------------------------------------------------


def assert_equal_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """NaN is NaN, whatever its sign."""
    same = (got.view(torch.int32) == wanted.view(torch.int32)) | (got.isnan() & wanted.isnan())
    assert same.all(), (got[~same][:5].tolist(), wanted[~same][:5].tolist())


def test_cuda_arithmetic_around_the_smallest_normal_number_equals_the_definition(host):
    """Results within 2^-22 of 2^-126 on both sides, where it matters how they are rounded."""
    count = 200_000
    target = factors(count, 0, 1, seed=1).abs().double() * 2.0**-23 + (1 - 2.0**-22)
    target = target * 2.0**-126
    a = factors(count, -126, 2, seed=2)
    b = (target / a.double()).float()
    assert_edge(host.operations(a, b, torch.zeros(count))[0], ieee.mul(a, b))
    b = (a.double() / target).float()
    few = b.isfinite()
    assert_edge(host.operations(a, b, a)[1][few], ieee.div(a, b)[few])
    a, b = factors(count, -50, -40, seed=3), factors(count, -50, -40, seed=4)
    c = (target - a.double() * b.double()).float()
    assert_equal_bits(host.operations(a, b, c)[2], ieee.fma(a, b, c))
    a, b = factors(count, -70, -60, seed=5), factors(count, -70, -60, seed=6)
    c = (target - a.double() * b.double()).float()
    assert_edge(host.operations(a, b, c)[2], ieee.fma(a, b, c))


def assert_edge(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (wanted.abs() == 2.0**-126).sum() > 100
    assert (wanted == 0).sum() > 100
    assert_equal_bits(got, wanted)


@pytest.mark.parametrize("block_size", [64 << k for k in range(7)])
def test_cuda_launch_has_barriers_for_its_teams_and_threads_for_their_registers(block_size):
    """csrc/cuda/team.h has two barriers, for teams of several warps."""
    segment = make("log", places(block_size)[0], scalars_at(1, ADAMW))
    launch = Launch.of(*kernel_steps.packed([segment]))
    assert launch.team_threads == max(32, block_size // 8)
    assert launch.team_threads == 32 or launch.teams <= 2
    assert 128 <= launch.team_threads * launch.teams <= 512
