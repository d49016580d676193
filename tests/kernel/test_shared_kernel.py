# SPDX-License-Identifier: Apache-2.0
"""The compiled step on v of rank 1 in tiles, codec `shared`, against the reference, bit for bit."""

import itertools
import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from segments import (
    Place,
    assert_same,
    assert_steps_inside,
    copied,
    framed_copy,
    gradient,
    make,
    moment_of,
    poison_moment,
    scalars_at,
    set_phases,
    tensors,
)
from tile_cases import hyper_of, new_gradient, place_of, segment_of

from zero8.algorithms.ademamix import ADEMAMIX
from zero8.algorithms.lion import LION
from zero8.op import kernel
from zero8.spec import reference
from zero8.spec.codec import SHARED
from zero8.spec.segment import Rounding, Segment

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16 = torch.float32, torch.bfloat16
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
every_isa = pytest.mark.parametrize("isa", kernel.isas())

CASES, STEPS = 120, 3


def stepped_as_the_reference(segment: Segment, isas, label: str, num_threads: int = 1) -> int:
    """Step with the reference, and with copies on instruction sets; return the blocks left."""
    followers = {isa: framed_copy(segment) for isa in isas}
    left = reference.step(segment)
    for isa, (one, frames) in followers.items():
        assert kernel.step([one], num_threads, isa) == [left], f"{label}, {isa}"
        assert_same(one, segment, f"{label}, {isa}")
        for name, frame in frames.items():
            beside = torch.cat([frame[:100], frame[-100:]])
            assert (beside == 77).all(), f"{label}, {isa}: beside {name}"
    return left


def check(number: int) -> int:
    """Take a few steps of one case on every instruction set, and on the reference."""
    chance = random.Random(number)
    hyper = hyper_of(chance)
    segment, left = segment_of(place_of(chance), hyper, chance), 0
    for step in range(1, STEPS + 1):
        segment.grad.copy_(new_gradient(segment, chance))
        segment.scalars = scalars_at(step, hyper)
        set_phases(segment, *(chance.randrange(2**32) for _ in range(2)))
        left += stepped_as_the_reference(segment, kernel.isas(), f"case {number}, step {step}")
    return left


def test_kernel_step_on_tiles_random_cases_equal_reference():
    assert sum(check(number) for number in range(CASES)) > CASES


# --- Single cases --------------------------------------------------------------------------------

WHOLE = Place((130, 700), 256, 0, 130 * 700)


def whole_after_a_step(place: Place = WHOLE) -> Segment:
    """Return a segment after a step on gradients whose rows and columns differ."""
    segment = make("shared", place, scalars_at(1, ADAMW))
    segment.grad.copy_(gradient(0, place.numel, seed=1))
    reference.step(segment)
    segment.scalars = scalars_at(2, ADAMW)
    segment.grad.copy_(gradient(0, place.numel, seed=2))
    return segment


def blocks_of(segment: Segment) -> torch.Tensor:
    return segment.grid.block_numbers(segment.first, segment.grad.numel())[0]


@pytest.mark.parametrize("poison", [math.nan, -math.inf, 2.0**63, 2.0**62])
def test_kernel_step_on_tiles_leaves_blocks_of_bad_gradients(poison):
    """Of 2^62 the square is a number, but too large for a tile."""
    segment = whole_after_a_step()
    segment.grad[[3, 700 * 70 + 699]] = poison
    was = copied(segment)
    assert stepped_as_the_reference(segment, kernel.isas(), "two blocks") == 2
    left = torch.isin(blocks_of(segment), torch.tensor([0, 70 * 3 + 2]))
    assert torch.equal(segment.param[left], was.param[left])
    assert not (segment.param[~left] == was.param[~left]).all()


def test_kernel_step_on_tiles_leaves_the_codes_of_tiles_whose_blocks_are_all_bad():
    segment = whole_after_a_step()
    of_tile = (blocks_of(segment) % 3 == 1) & (torch.arange(WHOLE.numel) < 64 * 700)
    segment.grad[of_tile] = math.inf
    was = tensors(copied(segment))
    assert stepped_as_the_reference(segment, kernel.isas(), "a tile") == 64
    now = tensors(segment)
    # Of 64 rows of 11 bytes.
    same = now["exp_avg_sq"][: 64 * 11].view(64, 11) == was["exp_avg_sq"][: 64 * 11].view(64, 11)
    assert same[:, 4:8].all() and not same[:, :4].all()
    scales = now["exp_avg_sq_scale"][: 64 * 3] == was["exp_avg_sq_scale"][: 64 * 3]
    assert torch.equal(scales.view(64, 3).all(0), torch.tensor([False, True, False]))


@every_isa
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_kernel_step_on_tiles_moment_that_is_no_number_leaves_its_block_as_it_was(isa, value):
    segment = whole_after_a_step()
    poison_moment(segment, "exp_avg_sq", value)
    assert stepped_as_the_reference(segment, [isa], "poisoned") == 1


def test_kernel_step_on_tiles_zero_gradients_keep_zero_moments():
    """Of all elements, of some rows, of some columns."""
    for rows, columns in itertools.product(([], [0, 63, 64], range(130)), ([], [0, 255, 256, 699])):
        segment = make("shared", WHOLE, scalars_at(1, ADAMW))
        grad = gradient(1, WHOLE.numel, seed=3).view(130, 700)
        grad[list(rows)], grad[:, columns] = 0.0, 0.0
        segment.grad.copy_(grad.view(-1))
        assert stepped_as_the_reference(segment, kernel.isas(), "zeros") == 0
        assert (moment_of(segment, "exp_avg_sq").scales.view(130, 3)[list(rows)] == 0).all()


@every_isa
def test_kernel_step_on_tiles_writes_nothing_beside_its_segment(isa):
    for shape, numel in itertools.product([(3, 300), (70, 65)], (1, 15, 17, 63, 255, 601)):
        place = Place(shape, 256, 299, numel)
        segment = make("shared", place, scalars_at(1, ADAMW), BF16)
        segment.grad.copy_(gradient(0, numel, seed=numel))
        step = partial(kernel.step, isa=isa)
        assert_steps_inside(segment, step, step, f"{isa}, {numel} elements")


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_kernel_step_on_tiles_any_number_of_threads_gives_the_same_bits(dtype):
    """Bands go to one thread each, whatever the segments are; so do the parts of a copy."""
    segments = []
    for place in (
        Place((500, 700), 256, 0, 350_000),
        Place((500, 700), 64, 30_001, 200_000),
        Place((64, 300), 256, 5, 300),
        Place((1, 9000), 4096, 0, 9000),
        Place((2**20, 100), 128, 6_399, 100_000),
    ):
        segment = make("shared", place, scalars_at(1, ADAMW), dtype, rounding=Rounding.DITHER)
        segment.grad.copy_(gradient(0, place.numel, seed=place.first))
        segment.grad[::777] = math.nan
        segment.copy = torch.zeros(place.numel, dtype=BF16)
        segments.append(segment)
    wanted = [copied(one) for one in segments]
    left = kernel.step(wanted, num_threads=1)
    for threads in (2, 3, 7, 16, 64):
        ours = [copied(one) for one in segments]
        assert kernel.step(ours, num_threads=threads) == left
        for one, other in zip(ours, wanted, strict=True):
            assert_same(one, other, f"{threads} threads")
    assert reference.step(segments[1]) == left[1]
    assert_same(wanted[1], segments[1], "the reference")


def test_kernel_step_on_tiles_bands_do_not_depend_on_shards():
    """Where shards meet between bands, they hold the tiles of the whole parameter."""
    whole = whole_after_a_step()
    parts = [whole_after_a_step(replace(WHOLE, first=first, numel=numel)) for first, numel in
             ((0, 64 * 700), (64 * 700, 66 * 700))]  # fmt: skip
    for name, value in tensors(whole).items():
        if name.startswith("exp_avg"):
            for part in parts:
                moment = moment_of(part, name.removesuffix("_scale"))
                source = moment.scales if name.endswith("_scale") else moment.values
                begin = part.first * value.numel() // whole.grad.numel()
                source.copy_(value[begin : begin + source.numel()])
    for part in parts:
        here = slice(part.first, part.first + part.grad.numel())
        part.param.copy_(whole.param[here])
        part.grad.copy_(whole.grad[here])
    kernel.step(parts)
    kernel.step([whole])
    for name, value in tensors(whole).items():
        assert torch.equal(torch.cat([tensors(part)[name] for part in parts]), value), name


# --- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [LION, ADEMAMIX])
def test_record_of_tiles_of_another_algorithm_is_refused(algorithm):
    records, scalars = kernel.packed([whole_after_a_step(Place((2, 100), 64, 0, 200))])
    records["algorithm"] = algorithm.number
    records["moments"]["codec"] = SHARED.number
    with pytest.raises(ValueError, match=r"algorithm: got \d, expected 1 \(Adam\) with codec 8"):
        kernel.check(records, len(scalars))


def test_record_of_tiles_of_narrow_rows_is_refused():
    records, scalars = kernel.packed([whole_after_a_step(Place((2, 100), 64, 0, 200))])
    records["own_row_length"] = 50
    with pytest.raises(ValueError, match="own_row_length: got 50, expected 100, the row_length"):
        kernel.check(records, len(scalars))
