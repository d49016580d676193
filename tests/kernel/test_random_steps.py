# SPDX-License-Identifier: Apache-2.0
"""Random segments on every instruction set against `zero8.spec.reference.step`, bit for bit.

With PYTHONPATH=.:tests/support, `python tests/kernel/test_random_steps.py 100000 [--first N]` takes
that many cases: `make fuzz-kernel`.
"""

import argparse
import math
import random
import time

import kernel_steps
import pytest
import torch
from segments import (
    CODEC_NAMES,
    KINDS,
    Place,
    assert_same,
    copied,
    correct,
    gradient,
    make,
    scalars_at,
    set_phases,
)
from tqdm import trange

from zero8.op import kernel
from zero8.spec import reference
from zero8.spec.ademamix import ADEMAMIX
from zero8.spec.grid import MIN_ROW_LENGTH, BlockGrid
from zero8.spec.lion import LION
from zero8.spec.segment import Rounding, Segment
from zero8.spec.sgd import SGD

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GRADIENTS = {FP32: (FP32, BF16, FP16), BF16: (FP32, BF16)}
SPECIAL = (math.nan, math.inf, -math.inf, 2.0**63, -1e30, 2.0**-140, -0.0)
QUICK, STEPS = 150, 3
FOUND = (35863, 81984)
"""Cases that were wrong once: signs of zeros where beta1 is 0."""


def place_of(chance: random.Random, codec: str | None) -> Place:
    """Return a place anywhere in a parameter, of a few elements to a few blocks."""
    block_size = 2 ** chance.choice((6, 6, 7, 8, 8, 8, 9, 12))
    row = chance.choice((1, 2, 17, 63, 64, 100, 256, 257, 1000, 5000))
    rows = chance.choice((2, 3, 40, 2**21))
    place = Place((rows, row), block_size, 0, 0)
    numel = min(rows * row, chance.choice((1, 7, 33, 64, 255, 256, 600, chance.randrange(2000))))
    first = chance.randrange(rows * row - numel + 1)
    if codec is not None:  # groups of narrow rows are never cut
        grid: BlockGrid = place.grid(codec)
        if grid.row_length != row:
            first -= first % grid.row_length
    return Place((rows, row), block_size, first, numel, offset=chance.randrange(6))


def hyper_of(number: int, chance: random.Random) -> dict:
    """Return hyperparameters, of each algorithm in turn."""
    if number % 3 == 1:
        nesterov = chance.random() < 0.5
        return {
            "algorithm": SGD,
            "lr": 10 ** chance.uniform(-6, 0),
            "momentum": chance.choice((1e-3, 0.5, 0.9, 0.99, 0.9999)),
            "dampening": 0.0 if nesterov else chance.choice((0.0, 0.5, 0.9, 1.0)),
            "nesterov": nesterov,
            "weight_decay": chance.choice((0.0, 1e-40, 0.01, 0.5)),
            "decoupled_weight_decay": chance.random() < 0.5,
            "maximize": chance.random() < 0.2,
        }
    if number % 6 == 2:
        betas = (0.0, 0.5, 0.9, 0.99), (0.25, 0.95, 0.999, 0.9999), (0.5, 0.9, 0.9999)
        return {
            "algorithm": ADEMAMIX,
            "lr": 10 ** chance.uniform(-6, 0),
            "betas": tuple(map(chance.choice, betas)),
            "alpha": chance.choice((0.0, 1.0, 5.0, 1e3)),
            "t_alpha": chance.choice((None, 2, 1000)),
            "eps": chance.choice((0.0, 1e-8, 1.0)),
            "weight_decay": chance.choice((0.0, 0.1)),
            "maximize": chance.random() < 0.2,
        }
    algorithm = {"algorithm": LION} if number % 3 == 2 else {}
    return algorithm | {
        "lr": 10 ** chance.uniform(-6, 0),
        "betas": (
            chance.choice((0.0, 0.5, 0.8, 0.9, 0.95, 0.99)),
            chance.choice((0.0, 0.25, 0.9, 0.95, 0.99, 0.999, 0.9999)),
        ),
        "eps": chance.choice((0.0, 2.0**-126, 1e-15, 1e-8, 1.0)),
        "weight_decay": chance.choice((0.0, 1e-40, 0.01, 0.5)),
        "decoupled": chance.random() < 0.7,
        "bias_correction": chance.random() < 0.8,
        "maximize": chance.random() < 0.2,
    }


def segment_of(hyper: dict, chance: random.Random) -> Segment:
    codec = chance.choice(CODEC_NAMES)
    dtype = chance.choice((FP32, BF16))
    rounding = chance.choice(list(Rounding))
    place, grad_dtype = place_of(chance, codec), chance.choice(GRADIENTS[dtype])
    segment = make(codec, place, scalars_at(1, hyper), dtype, grad_dtype, rounding)
    if dtype == BF16 and chance.random() < 0.3:
        generator = torch.Generator().manual_seed(chance.randrange(2**32))
        correction = torch.randint(-128, 128, (place.numel,), generator=generator)
        correct(segment, correction)
    return segment


def int8_segment_of(hyper: dict, chance: random.Random) -> Segment:
    """Return a segment of whole rows of INT8 weights, from anywhere in a parameter."""
    codec = chance.choice(CODEC_NAMES)
    block_size = 2 ** chance.choice((6, 6, 7, 8, 8, 9, 12))
    row = chance.choice((1, 2, 17, 63, 64, 100, 256, 257, 1000, 5000))
    rows = chance.choice((2, 3, 40, 2**21))
    count = min(rows, chance.choice((1, 2, max(1, 600 // row), max(1, 40_000 // row))))
    first = chance.randrange(rows - count + 1)
    if codec is not None and row < MIN_ROW_LENGTH:  # groups of narrow rows are never cut
        first -= first % (block_size // row)
    place = Place((rows, row), block_size, first * row, count * row, offset=chance.randrange(6))
    return make(
        codec,
        place,
        scalars_at(1, hyper),
        torch.int8,
        chance.choice(GRADIENTS[FP32]),
        chance.choice(list(Rounding)),
        row_scales_dtype=chance.choice((FP32, BF16)),
    )


def prepare(segment: Segment, hyper: dict, chance: random.Random, step: int) -> None:
    """Give a segment the gradient and the settings of step number `step`."""
    numel, dtype = segment.grad.numel(), segment.grad.dtype
    grad = gradient(chance.randrange(KINDS), numel, chance.randrange(2**32), dtype)
    values = segment.param if segment.row_scales is None else segment.row_scales
    for tensor in (grad, values):
        if tensor.numel() and chance.random() < 0.05:
            value = chance.choice(SPECIAL)
            tensor[chance.randrange(tensor.numel())] = value
    segment.grad.copy_(grad)
    if segment.weight_sums is not None and chance.random() < 0.5:  # so some corrections are stale
        begin = chance.randrange(segment.param.numel())
        written = segment.param[begin : begin + chance.choice((1, 2, 100, 1000))]
        chance.choice((written.zero_, written.neg_, written[::2].zero_))()
    segment.scalars = scalars_at(step, hyper)
    set_phases(segment, *(chance.randrange(2**32) for _ in range(2)))


def check(number: int, steppers) -> None:
    """Take a few steps of one case with every stepper, and on the reference."""
    chance = random.Random(number)
    hyper = hyper_of(number, chance)
    is_int8 = number % 8 == 5
    segment = (int8_segment_of if is_int8 else segment_of)(hyper, chance)
    names = [name for name in steppers if name != "cuda" or not is_int8]
    followers = {name: copied(segment) for name in names}
    for step in range(1, STEPS + 1):
        prepare(segment, hyper, chance, step)
        for one in followers.values():
            one.param.copy_(segment.param)
            one.grad.copy_(segment.grad)
            if is_int8:
                one.row_scales.copy_(segment.row_scales)
            one.scalars = segment.scalars
            set_phases(one, segment.moments[0].phase, segment.param_phase)
        wanted = reference.step(segment)
        for name, one in followers.items():
            label = f"case {number}, {name}, step {step}"
            assert steppers[name]([one]) == [wanted], label
            assert_same(one, segment, label)


@pytest.mark.usefixtures("one_torch_thread")
def test_kernel_step_random_cases_equal_reference(steppers):
    for number in (*range(QUICK), *FOUND):
        check(number, steppers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.time()
    for number in trange(given.first, given.first + given.count, mininterval=10):
        check(number, kernel_steps.on_every_isa(num_threads=1))
    isas = ", ".join(kernel.isas())
    print(f"{given.count} cases on {isas}: all as the reference, {time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
