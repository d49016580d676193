# SPDX-License-Identifier: Apache-2.0
"""Steps of an optimizer and of its fp32 twin over a partition of real size, on the CPU.

The demonstration's model is so small that its states stay in the cache and that Python takes most
of the host memory.  Here neither is so.
"""

import math
import statistics
from functools import partial

import torch
from torch import nn

import zero8
from benchmarks.states import state_bytes
from benchmarks.step.timing import Timed, interleaved
from examples.gpt.engine import TWINS
from examples.gpt.engines import engine_class

NUMEL = 2**25
ROUNDS = 30
# An optimizer that multiplies matrices steps many of the demonstration's size, and takes longer.
MATRICES = {"Muon8bitBlockwise": (256, 1024)}
ROUNDS_OF_MATRICES = 5
# Of both optimizers of a pair.
LR = 1e-6
HYPER = {
    "Adam8bitBlockwise": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "Lion8bitBlockwise": {"betas": (0.9, 0.99), "weight_decay": 0.01},
    "SGD8bitBlockwise": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Muon8bitBlockwise": {"momentum": 0.95, "weight_decay": 0.01},
}


def shapes(optimizer: str, numel: int) -> list[tuple[int, int]]:
    """Return the shapes of the tensors of `numel` parameters, a multiple of 2^18, for a pair."""
    if shape := MATRICES.get(optimizer):
        return [shape] * (numel // math.prod(shape))
    return [(numel // 4096, 4096)]


def measure(
    engine: str, optimizer: str, codec: str, numel: int = NUMEL, rounds: int | None = None
) -> dict:
    """Return the memory of each optimizer and the median time of its step, ready for JSON.

    Args:
        engine: whose twin is measured.
        optimizer: zero8's.
        codec: of its states.
        numel: float32 parameters, see `shapes`; both optimizers step over the same ones.
        rounds: timed steps of each optimizer, which take turns; by default 30, or 5 of matrices.
    """
    rounds = rounds or (ROUNDS_OF_MATRICES if optimizer in MATRICES else ROUNDS)
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes(optimizer, numel)]
    for param in params:
        param.grad = torch.randn_like(param).mul_(1e-3)
    group = {"params": params} | ({"use_muon": True} if optimizer in MATRICES else {})
    twin = TWINS[optimizer]
    ours = partial(getattr(zero8, optimizer), codec=codec)
    classes = {twin: engine_class(engine).twins[twin], optimizer: ours}
    optimizers = {
        name: make([{**group}], lr=LR, **HYPER[optimizer]) for name, make in classes.items()
    }
    for one in optimizers.values():
        one.step()  # makes the states
    samples = interleaved([Timed(one.step) for one in optimizers.values()], rounds)
    rows = []
    for (name, one), of_one in zip(optimizers.items(), samples, strict=True):
        states = state_bytes(one)
        row = {"optimizer": name, "state_bytes": states}
        row["host_bytes"] = sum(p.nbytes + p.grad.nbytes for p in params) + states
        rows.append(row | {"step_ms": statistics.median(of_one.times) / 1e6})
    return {"numel": numel, "threads": torch.get_num_threads(), "rounds": rounds, "rows": rows}
