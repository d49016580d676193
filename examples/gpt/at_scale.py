# SPDX-License-Identifier: Apache-2.0
"""Steps of an optimizer and of its fp32 twin over a partition of real size, on the CPU.

The demonstration's model is so small that its states stay in the cache and that Python takes most
of the host memory.  Here neither is so.
"""

import statistics

import torch
from torch import nn

import zero8
from examples.gpt.engine import TWINS
from examples.gpt.engines import engine_class
from zero8.bench.states import state_bytes
from zero8.bench.step.tensors import flat_shape
from zero8.bench.step.timing import Timed, interleaved

NUMEL = 2**25
ROUNDS = 30
# Of both optimizers of a pair.
LR = 1e-6
HYPER = {
    "Adam8bitBlockwise": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "Lion8bitBlockwise": {"betas": (0.9, 0.99), "weight_decay": 0.01},
    "SGD8bitBlockwise": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}


def measure(engine: str, optimizer: str, numel: int = NUMEL, rounds: int = ROUNDS) -> dict:
    """Return the memory of each optimizer and the median time of its step, ready for JSON.

    Args:
        engine: whose twin is measured.
        optimizer: zero8's.
        numel: float32 parameters, a multiple of 4096; all optimizers step over the same ones.
        rounds: timed steps of each optimizer; they take turns.
    """
    param = nn.Parameter(torch.randn(flat_shape(numel)))
    param.grad = torch.randn_like(param).mul_(1e-3)
    twin = TWINS[optimizer]
    classes = {twin: engine_class(engine).twins[twin], optimizer: getattr(zero8, optimizer)}
    optimizers = {name: make([param], lr=LR, **HYPER[optimizer]) for name, make in classes.items()}
    for one in optimizers.values():
        one.step()  # makes the states
    samples = interleaved([Timed(one.step) for one in optimizers.values()], rounds)
    rows = []
    for (name, one), of_one in zip(optimizers.items(), samples, strict=True):
        states = state_bytes(one)
        row = {"optimizer": name, "state_bytes": states}
        row["host_bytes"] = param.nbytes + param.grad.nbytes + states
        rows.append(row | {"step_ms": statistics.median(of_one.times) / 1e6})
    return {"numel": numel, "threads": torch.get_num_threads(), "rounds": rounds, "rows": rows}
