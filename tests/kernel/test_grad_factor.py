# SPDX-License-Identifier: Apache-2.0
"""A gradient factor in a step has the bits of gradients that were multiplied before it."""

import kernel_steps
import pytest
import torch
from segments import Place, assert_same, copied, make, scalars_at

from zero8.op import kernel
from zero8.spec.segment import Rounding

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Without betas the first moment is the gradient, and every bit of that matters.
BARE = {"lr": 1e-3, "betas": (0.0, 0.0), "eps": 1e-8, "weight_decay": 0.0}


@pytest.mark.parametrize("factor", [1 / 3, 2.0**-16, 1 / 65536.3, 0.999999, 3.0])
@pytest.mark.parametrize("dtypes", [(FP32, BF16), (FP32, FP16), (BF16, BF16)], ids=str)
def test_kernel_grad_factor_of_every_16_bit_gradient_equals_torch(dtypes, factor):
    """In the wider dtype; but for gradients and products below 2^-126, which count as 0."""
    factor = torch.tensor(factor).item()
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = patterns.view(dtypes[1])
    smallest = every.float().abs().minimum(every.float().mul(factor).abs())
    every = torch.where((smallest < 2.0**-125) & (smallest != 0), 0.0, every)
    plain = scalars_at(1, BARE)
    place = Place((256, 256), 256, 0, 2**16)
    one = make(None, place, plain._replace(grad_factor=factor), *dtypes, Rounding.DITHER)
    one.grad.copy_(every)
    other = copied(one)
    other.scalars, other.grad = plain, every.to(torch.promote_types(*dtypes)).mul_(factor)
    for isa in kernel.isas():
        mine, theirs = copied(one), copied(other)
        assert kernel_steps.step([mine], isa=isa) == kernel_steps.step([theirs], isa=isa)
        theirs.grad = mine.grad
        assert_same(mine, theirs, f"{isa}, factor {factor}")
