# SPDX-License-Identifier: Apache-2.0
"""torch.set_default_device and set_default_dtype change nothing of what a step does."""

import copy

import pytest
import torch
from moment_samples import same
from nests import assert_same

from zero8 import Adam8bitBlockwise
from zero8.integrations.health import health
from zero8.spec import arithmetic as ieee
from zero8.spec.codec import CODECS

SHAPES = {"weight": (64, 256), "bias": (300,), "half": (40, 128)}


@pytest.fixture(params=["device", "dtype"])
def other_default(request):
    """Return a function that sets torch's default device or dtype, which is undone at the end."""

    def set_it():
        forget_tables()
        if request.param == "device":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.bfloat16)

    yield set_it
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    forget_tables()


def forget_tables():
    """Have codecs make their tables anew."""
    for codec in CODECS.values():
        for code in (codec.of_signed, codec.of_unsigned):
            for part in (code, getattr(code, "narrow", code), getattr(code, "wide", code)):
                for table in ("levels", "thresholds"):
                    vars(part).pop(table, None)


def train(codec):
    """Step, load the state into optimizers of this codec and of another, step on."""
    generator = torch.Generator("cpu").manual_seed(3)
    options = {"generator": generator, "device": "cpu", "dtype": torch.float32}
    params = [torch.randn(shape, **options) for shape in SHAPES.values()]
    params[2] = params[2].bfloat16()
    params = [torch.nn.Parameter(p) for p in params]
    grads = [torch.randn(p.shape, **options).to(p.dtype) for p in params]
    other = next(name for name in CODECS if name != codec)
    results, state = [], None
    for name in (codec, codec, other, codec):
        optimizer = Adam8bitBlockwise(
            params, lr=0.01, codec=name, weight_decay=0.1, weight_correction_bits=8
        )
        if state is not None:
            optimizer.load_state_dict(state)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        state = optimizer.state_dict()
        results.append(copy.deepcopy([state, [p.detach() for p in params]]))
    return results


@pytest.mark.parametrize("codec", CODECS)
def test_step_and_load_under_another_default_give_the_same_bits(other_default, codec):
    expected = train(codec)
    other_default()
    assert_same(train(codec), expected)


def test_arithmetic_under_another_default_takes_numbers_as_float32(other_default):
    x = torch.tensor([0.3, -7.0])
    expected = [ieee.mul(x, 0.3), ieee.div(x, 0.3), ieee.fma(x, 0.3, 0.7)]
    other_default()
    assert same([ieee.mul(x, 0.3), ieee.div(x, 0.3), ieee.fma(x, 0.3, 0.7)], expected)


def test_health_under_other_defaults_is_what_it_was(other_default):
    p = torch.nn.Parameter(torch.randn(64, 256, generator=torch.Generator().manual_seed(1)))
    optimizer = Adam8bitBlockwise([p])
    p.grad = p.detach().clone()
    optimizer.step()
    expected = health(optimizer)
    other_default()
    assert health(optimizer) == expected
