# SPDX-License-Identifier: Apache-2.0
"""bfloat16 weights without float32 masters: dithered, hashed, and with 8 more bits beside them."""

import copy

import pytest
import torch
from small_optimizers import joined, param, required_by, run
from torch import nn

from zero8 import Adam8bitBlockwise
from zero8.optimizer.elementwise import OPTIMIZERS
from zero8.spec.reference import corrected_bfloat16
from zero8.spec.segment import Rounding

SHAPE = (24, 300)
MADE = {one.algorithm.name: (one, required_by(one)) for one in OPTIMIZERS} | {
    "adam, float32 moments": (Adam8bitBlockwise, {"min_8bit_size": 10**6}),
}
MASK = (torch.arange(24 * 300).view(SHAPE) % 3 > 0).bfloat16()


def replace_data(p):
    p.data = p.data * 2


def replace_by_columns(p):
    p.data = (p.data * 2).t().contiguous().t()


WRITES = {
    "mul_ by a mask": lambda p: p.mul_(MASK),
    "mul_ by a mask through data": lambda p: p.data.mul_(MASK),
    "zero_": lambda p: p.zero_(),
    "data = x": replace_data,
    "data = x, which steps see anew": replace_by_columns,
    "copy_": lambda p: p.copy_(torch.linspace(-1, 1, p.numel()).view(SHAPE)),
    "fill_ with a tiny value": lambda p: p.fill_(1e-38),
    "fill_ with infinity": lambda p: p.fill_(float("inf")),
    "neg_": lambda p: p.neg_(),
    "one element": lambda p: p.view(-1)[::44].add_(1),  # or a few of each block: short ones have 44
}


def optimizer_made(name):
    made, settings = MADE[name]
    p = param(*SHAPE, dtype=torch.bfloat16)
    settings = {"lr": 1e-3, "seed": 3, "weight_correction_bits": 8} | settings
    return made([("weight", p)], **settings), p


def bits_of(optimizer, p):
    return torch.cat([p.detach().view(torch.int16), optimizer.state[p]["param_correction"]])


def stepped_without_corrections(optimizer, p, step):
    """Return the bits after a step that reads the weights in memory, all corrections being 0."""
    other = copy.deepcopy(optimizer)
    (q,) = other.param_groups[0]["params"]
    other.state[q]["param_correction"].zero_()
    assert torch.equal(q, p)
    run(other, [q], 1, start=step)
    return bits_of(other, q)


def test_corrected_bfloat16_is_the_nearest_24_bits_and_the_nearest_bfloat16():
    """24 bits of which 16 are mantissa: half a unit is 2^-16 of the power of two, so 2^-16 of x.

    The bfloat16 keeps 8 of them: 2^-8.  2^-24 more for the sum's rounding to 24 bits first.
    """
    bits = torch.randint(0, 0x7F000000, (1 << 20,), generator=torch.Generator().manual_seed(1))
    edges = torch.tensor([0, 127, 128, 129, 255, 256, 0x7FFF, 0x8000, 0x8080, 0xFF7F, 0xFF80])
    bits = torch.cat([bits, 0x3F800000 + edges]).to(torch.int32)
    x = bits.view(torch.float32)
    x = torch.cat([x, -x])
    p, correction = corrected_bfloat16(x)
    whole = x.abs() >= 2.0**-126
    assert bool(((joined(p, correction) - x).abs() <= 2.0**-16 * x.abs())[whole].all())
    assert bool(((p.float() - x).abs() <= (2.0**-8 + 2.0**-16) * x.abs())[whole].all())


@pytest.mark.parametrize("x", [3.4e38, -3.4e38, 3.3961e38, (2 - 2**-8) * 2.0**127])
def test_corrected_bfloat16_of_a_finite_number_is_finite(x):
    p, correction = corrected_bfloat16(torch.tensor([x]))
    assert bool(p.isfinite().all())
    assert bool(joined(p, correction).isfinite().all())


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", MADE)
def test_weights_that_a_script_writes_count_as_they_are(name, write):
    optimizer, p = optimizer_made(name)
    run(optimizer, [p], 3)
    with torch.no_grad():
        write(p)
    expected = stepped_without_corrections(optimizer, p, 3)
    run(optimizer, [p], 1, start=3)
    assert torch.equal(bits_of(optimizer, p), expected)
    assert not p.isnan().any()


@pytest.mark.parametrize("name", MADE)
def test_mask_after_every_step_leaves_the_corrections_of_other_weights(name):
    """Without decay, the other weights are those of a training in which nothing is masked."""
    runs = []
    for is_masked in (True, False):
        optimizer, p = optimizer_made(name)
        with torch.no_grad():
            p.mul_(MASK)
        for step in range(5):
            run(optimizer, [p], 1, start=step)
            if is_masked:
                with torch.no_grad():
                    p.mul_(MASK)
        runs.append(joined(p.detach(), optimizer.state[p]["param_correction"]))
    assert torch.equal(*(run[MASK > 0] for run in runs))
    assert not torch.equal(*runs)


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), float("-inf")])
def test_loaded_corrections_of_weights_that_have_none_do_not_count(value):
    """A checkpoint may have been saved between a script's write and the next step."""
    optimizer, p = optimizer_made("adam")
    run(optimizer, [p], 3)
    saved = optimizer.state_dict()
    saved["state"][0]["param_correction"].fill_(-100)
    with torch.no_grad():
        p.fill_(value)
    optimizer.load_state_dict(saved)
    expected = stepped_without_corrections(optimizer, p, 3)
    run(optimizer, [p], 1, start=3)
    assert torch.equal(bits_of(optimizer, p), expected)


def test_correction_of_a_checkpoint_is_dropped_with_a_warning_where_none_is_kept(caplog):
    optimizer, p = optimizer_made("adam")
    run(optimizer, [p], 1)
    other = Adam8bitBlockwise([nn.Parameter(p.detach().clone())])
    with caplog.at_level("WARNING", logger="zero8"):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert "weight_correction_bits" in caplog.text
    assert "param_correction" not in next(iter(other.state.values()))


@pytest.mark.parametrize("rounding", [Rounding.DITHER, Rounding.HASH, Rounding.NEAREST])
def test_bfloat16_weight_of_1_under_updates_of_1e_4(rounding):
    """Nearest rounding never moves the weight, stochastic rounding follows within 1 %.

    With a constant gradient u is 1, so an update is 1e-4, below half a unit of bfloat16 just under
    1 (2^-9): nearest is stuck.  2000 steps lead from 1 to 0.8.  One hashed rounding has a variance
    of at most 2^-8 * 1e-4, so the mean of 7200 weights after 2000 steps a standard deviation below
    sqrt(2000 * 2^-8 * 1e-4 / 7200) = 3.3e-4: four of them are 0.17 % of 0.8.
    """
    names = {Rounding.DITHER: "dither", Rounding.HASH: "hash", Rounding.NEAREST: False}
    p = nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16))
    optimizer = Adam8bitBlockwise([p], lr=1e-4, stochastic_rounding=names[rounding])
    for _ in range(2000):
        p.grad = torch.ones_like(p)
        optimizer.step()
    if rounding == Rounding.NEAREST:
        assert bool((p == 1).all())
    else:
        assert p.float().mean().item() == pytest.approx(0.8, rel=0.01)
