# SPDX-License-Identifier: Apache-2.0
"""A gradient factor in a step has the bits of gradients that were multiplied before it."""

import kernel_steps
import pytest
import torch
from segments import Place, assert_same, copied, gradient, make, scalars_at

from zero8.op import kernel
from zero8.spec import reference
from zero8.spec.segment import Rounding

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
PLACES = [
    Place((3, 300), 256, 299, 257, offset=3),
    Place((3, 257), 256, 0, 3 * 257),
    Place((2, 5000), 4096, 4095, 3001),
    Place((9, 64), 256, 0, 9 * 64),
]
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
# Without betas the first moment is the gradient, and every bit of that matters.
BARE = {"lr": 1e-3, "betas": (0.0, 0.0), "eps": 1e-8, "weight_decay": 0.0}
FACTORS = [1 / 3, 2.0**-16, 1 / 65536.3, 0.999999, 3.0]


def float32(x: float) -> float:
    return torch.tensor(x, dtype=FP32).item()


def pair(codec, place, dtypes, factor, hyper):
    """Return a segment with a factor, and one like it without."""
    plain = scalars_at(1, hyper)
    with_factor = plain._replace(grad_factor=float32(factor))
    one = make(codec, place, with_factor, *dtypes, Rounding.DITHER)
    other = copied(one)
    other.scalars = plain
    return one, other


def assert_steps_alike(one, other, factor):
    """Multiply the gradients of `other` as torch does, and compare the steps."""
    multiply(other, factor)
    for isa in kernel.isas():
        mine, theirs = copied(one), copied(other)
        counts = kernel_steps.step([mine], isa=isa)
        assert counts == kernel_steps.step([theirs], isa=isa)
        theirs.grad = mine.grad
        assert_same(mine, theirs, f"{isa}, factor {factor}")


def multiply(segment, factor):
    """Multiply the gradients in the wider dtype of them and the parameter."""
    wider = torch.promote_types(segment.grad.dtype, segment.param.dtype)
    segment.grad = segment.grad.to(wider).mul_(factor)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtypes", [(FP32, BF16), (FP32, FP16), (BF16, BF16)], ids=str)
def test_kernel_grad_factor_of_every_16_bit_gradient_equals_torch(dtypes, factor):
    """But for gradients and products below 2^-126, which count as 0."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = patterns.view(dtypes[1])
    smallest = every.float().abs().minimum(every.float().mul(float32(factor)).abs())
    every = torch.where((smallest < 2.0**-125) & (smallest != 0), 0.0, every)
    place = Place((256, 256), 256, 0, 2**16)
    one, other = pair(None, place, dtypes, factor, BARE)
    for grad in (one.grad, other.grad):
        grad.copy_(every)
    assert_steps_alike(one, other, factor)


def test_reference_grad_factor_equals_gradients_multiplied_by_torch():
    for dtypes in ((FP32, FP32), (BF16, BF16), (FP32, FP16), (FP32, BF16), (BF16, FP32)):
        one, other = pair("log", PLACES[1], dtypes, 1 / 3, ADAM)
        for grad in (one.grad, other.grad):
            grad.copy_(gradient(0, grad.numel(), seed=5, dtype=dtypes[1]))
        multiply(other, 1 / 3)
        reference.step(one), reference.step(other)
        other.grad = one.grad
        assert_same(one, other, str(dtypes))


@pytest.mark.parametrize("isa", [*kernel.isas()])
def test_kernel_grad_factor_product_that_overflows_leaves_the_block(isa):
    one, _ = pair("log", PLACES[1], (FP32, FP32), 2.0**40, ADAM)
    one.grad.fill_(1.0)
    one.grad[300] = 2.0**30  # finite, and its product is beyond the limit of 2^63
    before = copied(one)
    assert kernel_steps.step([one], isa=isa) == [1]
    block = one.grid.block_numbers(one.first, one.param.numel())[0]
    kept = block == block[300]
    assert torch.equal(one.param[kept], before.param[kept])
    assert not torch.equal(one.param[~kept], before.param[~kept])
