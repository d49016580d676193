# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel, compiled for the host: launches, ends of memory, and numbers next to 2^-126.

It is the whole kernel, and tests/kernel compares its bits with the reference's.  What the host
cannot show is how a GPU rounds; the instructions are looked at in test_cuda_compile.py.
"""

import ctypes
import mmap
from dataclasses import replace
from pathlib import Path

import kernel_steps
import numpy as np
import pytest
import torch
from host_kernel import Host
from places import FOLDERS
from segments import (
    CODEC_NAMES,
    DTYPES,
    HYPERS,
    KINDS,
    Place,
    as_end_of_whole,
    assert_same,
    copied,
    factors,
    gradient,
    make,
    mapped,
    scalars_at,
    set_phases,
    tensors,
)

from zero8.op.cuda import Launch
from zero8.spec import arithmetic as ieee
from zero8.spec.segment import Segment

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

ADAMW, L2 = HYPERS["adamw"], HYPERS["factor, l2, maximize"]


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


def assert_follows_cpu(host_kernel: Host, segments: list[Segment], hyper: dict, count=3, **options):
    mine = [copied(segment) for segment in segments]
    for step in advance(segments, mine, hyper, count):
        wanted = kernel_steps.step(segments)
        got = host_kernel.step(mine, backwards=step % 2 == 0, **options)
        for number, pair in enumerate(zip(mine, segments, strict=True)):
            assert_same(*pair, f"step {step}, segment {number}")
        assert got == wanted


@pytest.mark.parametrize("grid", [1, 2, 7, 10_000])
def test_cuda_step_one_launch_over_all_kinds_does_not_depend_on_the_grid(host_kernel, grid):
    """Segments of all codecs, dtypes and block sizes: teams of the largest serve them all."""
    segments = [
        make(codec, place, scalars_at(1, L2), *dtypes)
        for number, codec in enumerate(CODEC_NAMES)
        for block_size in (64, 256, 1024)
        for place, dtypes in zip(
            places(block_size), list(DTYPES.values())[number:] + list(DTYPES.values()), strict=False
        )
    ]
    assert_follows_cpu(host_kernel, segments, L2, count=2, grid=grid)


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
                mine = mapped(segment, lambda _, x: at_the_end(x))
                kernel_steps.step([segment])
                host.step([mine])
                assert_same(mine, segment, f"{codec}, {dtypes}, {numel} elements")
    print("stepped")


def test_cuda_step_reads_nothing_beyond_its_segment(forks, host_kernel):
    """In a process of its own, which ends if it does."""
    folder = str(host_kernel.path.parent)  # where it is compiled already
    code = f"import test_cuda_kernel; test_cuda_kernel.step_at_the_end_of_memory({folder!r})"
    done = forks.run(f"import sys; sys.path[:0] = {FOLDERS!r}; {code}")
    assert done.returncode == 0 and "stepped" in done.stdout, done.stderr


def test_cuda_step_blocks_beyond_two_to_the_32_elements_are_stepped_like_any_others(host_kernel):
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
    host_kernel.launch(replace(launch, num_blocks=2), first_blocks=first_blocks.ctypes.data)
    kernel_steps.step([near])
    for name, value in tensors(near).items():
        assert torch.equal(tensors(far)[name][-len(value) :], value), name
    assert not tensors(far)["exp_avg"][:1000].any()


# --- Flush to zero -------------------------------------------------------------------------------


def assert_equal_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """NaN is NaN, whatever its sign."""
    same = (got.view(torch.int32) == wanted.view(torch.int32)) | (got.isnan() & wanted.isnan())
    assert same.all(), (got[~same][:5].tolist(), wanted[~same][:5].tolist())


def test_cuda_arithmetic_around_the_smallest_normal_number_equals_the_definition(host_kernel):
    """Results within 2^-22 of 2^-126 on both sides, where it matters how they are rounded."""
    count = 200_000
    target = factors(count, 0, 1, seed=1).abs().double() * 2.0**-23 + (1 - 2.0**-22)
    target = target * 2.0**-126
    a = factors(count, -126, 2, seed=2)
    b = (target / a.double()).float()
    assert_edge(host_kernel.operations(a, b, torch.zeros(count))[0], ieee.mul(a, b))
    b = (a.double() / target).float()
    few = b.isfinite()
    assert_edge(host_kernel.operations(a, b, a)[1][few], ieee.div(a, b)[few])
    a, b = factors(count, -50, -40, seed=3), factors(count, -50, -40, seed=4)
    c = (target - a.double() * b.double()).float()
    assert_equal_bits(host_kernel.operations(a, b, c)[2], ieee.fma(a, b, c))
    a, b = factors(count, -70, -60, seed=5), factors(count, -70, -60, seed=6)
    c = (target - a.double() * b.double()).float()
    assert_edge(host_kernel.operations(a, b, c)[2], ieee.fma(a, b, c))


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
