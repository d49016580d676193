# SPDX-License-Identifier: Apache-2.0
"""Steps of INT8 weights: those of float32 ones between (W1) and (W3) of zero8.spec.int8_rows."""

import pytest
import torch
from int8_weights import copy_of, int8_param, same_bits
from small_optimizers import param, run, set_grads
from torch import nn

import zero8
from zero8.optimizer import widened as in_chunks
from zero8.spec import dither, int8_rows
from zero8.spec.codec import CODECS
from zero8.spec.segment import Rounding

# Ragged columns, narrow rows (5 of which share a block), one block, a long row; one has float32
# moments, as it is small.
SHAPES = ((130, 300), (200, 48), (64, 256), (3, 5000), (10, 20))
MAKERS = {
    **{name: (zero8.Adam8bitBlockwise, {"codec": name}) for name in CODECS},
    "SGD": (zero8.SGD8bitBlockwise, {"momentum": 0.9}),
    "Lion": (zero8.Lion8bitBlockwise, {}),
}
ROUNDINGS = {True: Rounding.DITHER, "hash": Rounding.HASH, False: Rounding.NEAREST}


def weights_of(shape, seed=0):
    return param(*shape, seed=seed).detach() * 0.05


def make(maker, params, **settings):
    cls, keywords = maker
    named = [(f"layer{number}", p) for number, p in enumerate(params)]
    return cls(named, **{"lr": 1e-3, "seed": 5, "weight_decay": 0.1} | keywords | settings)


def int8_params(dtype=torch.float32):
    return [int8_param(weights_of(shape, seed), dtype) for seed, shape in enumerate(SHAPES)]


def rounded(weights, before, rounding, name, step):
    """Return codes and scales of a whole parameter after a step, as the equations say."""
    phase = dither.phase_of(dither.stream_key(5, dither.identity_of(name), "param"), step)
    shape = tuple(weights.shape)
    found = int8_rows.thresholds(rounding, phase, 0, shape, weights.device)
    scales = int8_rows.new_scales(weights, before)
    return int8_rows.encoded(weights, scales, found), scales


@pytest.fixture(params=["in the kernel", "widened"])
def way(request, monkeypatch):
    """Step INT8 weights in the kernel, and as a device does whose kernel does not take them."""
    if request.param == "widened":
        monkeypatch.setattr(in_chunks, "is_widened", lambda device: True)
        monkeypatch.setattr(in_chunks, "MOST_ELEMENTS", 20_000)  # of `SHAPES` one has two pieces


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("maker", MAKERS)
def test_step_of_int8_weights_is_that_of_float32_ones_rounded(maker, rounding):
    dtype = torch.bfloat16 if rounding == "hash" else torch.float32
    params = int8_params(dtype)
    wide = [nn.Parameter(int8_rows.decoded(p.int_data, p.scale)) for p in params]
    ours = make(MAKERS[maker], params, stochastic_rounding=rounding)
    theirs = make(MAKERS[maker], wide, stochastic_rounding=rounding)
    for step in range(1, 5):
        set_grads(params, step)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float()
        before = [p.scale.clone() for p in params]
        ours.step()
        theirs.step()
        for number, (p, w) in enumerate(zip(params, wide, strict=True)):
            after = w.detach(), before[number]
            codes, scales = rounded(*after, ROUNDINGS[rounding], f"layer{number}", step)
            assert torch.equal(p.int_data, codes) and torch.equal(p.scale, scales), (number, step)
            w.data.copy_(int8_rows.decoded(codes, scales))
    for p, w in zip(params, wide, strict=True):
        for mine, other in zip(ours.moments(p), theirs.moments(w), strict=True):
            assert torch.equal(mine.codes, other.codes) and torch.equal(mine.scales, other.scales)
            assert torch.equal(mine.dense, other.dense)


def trained(params, steps=3, **settings):
    optimizer = make(MAKERS["log"], params, **settings)
    run(optimizer, params, steps)
    return optimizer


@pytest.mark.usefixtures("way")
def test_step_of_int8_weights_without_rows_does_nothing():
    p = nn.Parameter(int8_param(weights_of((4, 64))))
    p.int_data, p.scale = p.int_data[:0], p.scale[:0]
    empty = nn.Parameter(type(p)(p.int_data, p.scale))
    other = int8_param(weights_of((64, 64)))
    before = copy_of(other)
    trained([empty, other], steps=2)
    assert empty.int_data.shape == (0, 64) and not same_bits(other, before)


@pytest.mark.usefixtures("way")
def test_step_of_int8_weights_tells_autograd_of_its_writes():
    p = int8_param(weights_of((64, 64)))
    before = p._version, p.int_data._version
    trained([p], steps=1)
    assert p._version > before[0] and p.int_data._version > before[1]


def test_step_of_int8_weights_has_the_same_skipped_blocks_with_any_number_of_pieces(monkeypatch):
    """Blocks of float32 moments run through the rows of 301 elements."""
    found = []
    for most in (None, 1 << 18, 1):
        if most is not None:
            monkeypatch.setattr(in_chunks, "is_widened", lambda device: True)
            monkeypatch.setattr(in_chunks, "MOST_ELEMENTS", most)
        p = int8_param(weights_of((600, 301)))
        optimizer = trained([p], steps=1, fp32_params=["*"])
        set_grads([p], 1)
        p.grad[64, 0] = p.grad[400, 300] = torch.nan
        with pytest.raises(FloatingPointError):
            optimizer.step()
        found.append((p, [store.dense for store in optimizer.moments(p)]))
    (p, moments), *others = found
    for other, its_moments in others:
        assert same_bits(p, other) and all(map(torch.equal, moments, its_moments))
