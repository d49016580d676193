# SPDX-License-Identifier: Apache-2.0
"""Small parameters, and steps on gradients that are a function of the step, for optimizer tests."""

import io

import torch
from torch import nn

import zero8

FP32 = torch.float32
LR, BETAS, DECAY = 1e-2, (0.9, 0.99), 0.1
OPTIONS = {
    zero8.Adam8bitBlockwise: {"lr": LR, "betas": BETAS, "eps": 1e-6, "weight_decay": DECAY},
    zero8.Lion8bitBlockwise: {"lr": LR, "betas": BETAS, "weight_decay": DECAY},
    zero8.SGD8bitBlockwise: {"lr": LR, "momentum": 0.9, "weight_decay": DECAY, "nesterov": True},
    zero8.AdEMAMix8bitBlockwise: {
        "lr": LR,
        "weight_decay": DECAY,
        "alpha": 2.0,
        "t_alpha": 4,
        "t_beta3": 8,
    },
}
"""Keywords of each optimizer that steps element by element."""


def param(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))


def named_params(shapes: dict, dtype: torch.dtype = FP32) -> dict[str, nn.Parameter]:
    """Return parameters by name, of these shapes."""
    return {name: param(*s, seed=n, dtype=dtype) for n, (name, s) in enumerate(shapes.items())}


def required_by(made) -> dict:
    """Return the keywords that an optimizer cannot be made without."""
    required = {"momentum": 0.9, "adam_params": ()}  # of parameters without names
    return {key: value for key, value in required.items() if key in made.algorithm.keywords}


def set_grads(params, step: int) -> None:
    for number, p in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + number)
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def run(optimizer, params, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        set_grads(params, step)
        optimizer.step()


def joined(p: torch.Tensor, correction: torch.Tensor) -> torch.Tensor:
    """Return the 24-bit weights of `weight_correction_bits=8` in float32."""
    bits = (p.view(torch.int16).to(torch.int32) << 16) + (correction.to(torch.int32) << 8)
    return bits.view(torch.float32)


def assert_equal(params, others) -> None:
    for number, (p, q) in enumerate(zip(params, others, strict=True)):
        assert torch.equal(p, q), f"parameter {number}"


def bytes_of(contents, **options) -> bytes:
    """Return a file of torch.save with these contents."""
    file = io.BytesIO()
    torch.save(contents, file, **options)
    return file.getvalue()


def through_file(contents):
    """Return what is read of a file with these contents."""
    return torch.load(io.BytesIO(bytes_of(contents)), weights_only=True)


def small_model(dtype: torch.dtype = FP32) -> nn.Sequential:
    """Two 8-bit matrices, of which one has ragged rows, and two float32 biases."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(300, 64), nn.Linear(64, 100)).to(dtype)
