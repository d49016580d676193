# SPDX-License-Identifier: Apache-2.0
"""Experts whose gradients depend on their number and the step, spread over ranks in several ways.

An expert has the same local name on every rank that has one in its place; the number counts over
all ranks.
"""

import os
from dataclasses import replace

import torch
from deepspeed.moe.layer import MoE
from zero_worker import base_optimizer, config, held, make_engine, pattern, take_step

import zero8

EXPERTS = 4
LOCAL = "moe.deepspeed_moe.experts.deepspeed_experts."
DENSE = {"dense": (50, 100), "moe.deepspeed_moe.gate.wg.weight": (EXPERTS, 96)}
# By where the experts are: on every rank, or spread over two.
EXPERT_LAYOUTS = {
    "zero1, experts on every rank": config(1, None),
    "zero1, experts on two ranks": config(1, None),
    "zero1 round robin, experts on two ranks": config(
        1, None, zero={"round_robin_gradients": True}
    ),
    "zero1 bf16, fp32 gradients, experts on two ranks": config(1, None, dtype={})
    | {"data_types": {"grad_accum_dtype": "fp32"}},
    "zero2 offload, experts on every rank": config(2),
    "zero2 offload, experts on two ranks": config(2),
    "zero2 bf16, experts on two ranks": config(2, None, dtype={}),
}


def ep_size_of(name):
    return 2 if name.endswith("two ranks") else 1


def numbered(name, ep_size, place):
    """Return a parameter's name with the number of its expert; `place` is the rank's among them."""
    if not name.startswith(LOCAL):
        return name
    local, kind = name.removeprefix(LOCAL).split(".")
    return f"expert {place * EXPERTS // ep_size + int(local)} {kind}"


class Experts(torch.nn.Module):
    """A dense parameter, a gate and experts, of which this rank has those of its place."""

    def __init__(self, ep_size):
        super().__init__()
        self.ep_size, self.place = ep_size, int(os.environ["RANK"]) % ep_size
        self.dense = torch.nn.Parameter(torch.zeros(DENSE["dense"]))
        self.moe = MoE(96, torch.nn.Linear(96, 67), num_experts=EXPERTS, ep_size=ep_size)
        for name, p in self.named_parameters():
            p.data.copy_(pattern(f"init {numbered(name, ep_size, self.place)}", p.shape))

    def forward(self, step):
        """Return a loss whose gradients, averaged over ranks, are pattern(numbered name step)."""
        total = 0.0
        for name, p in self.named_parameters():
            grad = pattern(f"{numbered(name, self.ep_size, self.place)} {step}", p.shape)
            if name.startswith(LOCAL):
                # DeepSpeed divides by all ranks, though those with other experts add nothing.
                grad *= self.ep_size
            total = total + (p * grad.to(p.dtype)).sum()
        return total


def step_experts(name, steps):
    """Step in a layout; return what this rank holds, its pieces by numbered names."""
    ep_size = ep_size_of(name)
    model = Experts(ep_size)
    engine = make_engine(EXPERT_LAYOUTS[name], model)
    for step in range(steps):
        take_step(engine, step)
    result = held(engine) | {"group keys": [sorted(g) for g in base_optimizer(engine).param_groups]}
    for state in result["states"]:
        state["pieces"] = tuple(
            replace(piece, name=numbered(piece.name, ep_size, model.place))
            for piece in state["pieces"]
        )
    return result


def expert_reference(name, steps):
    """Return {numbered name: (weights, its state)} of plain optimizers, one for each place."""
    ep_size, options = ep_size_of(name), EXPERT_LAYOUTS[name]["optimizer"]["params"]
    expected = {}
    for place in range(ep_size):
        shapes = dict(DENSE)
        for local in range(EXPERTS // ep_size):
            shapes |= {f"{LOCAL}{local}.weight": (67, 96), f"{LOCAL}{local}.bias": (67,)}
        params = {
            n: torch.nn.Parameter(pattern(f"init {numbered(n, ep_size, place)}", shape))
            for n, shape in shapes.items()
        }
        optimizer = zero8.Adam8bitBlockwise(params.items(), **options)
        for step in range(steps):
            for n, p in params.items():
                p.grad = pattern(f"{numbered(n, ep_size, place)} {step}", p.shape)
            optimizer.step()
        for n, p in params.items():
            expected[numbered(n, ep_size, place)] = (p.detach(), optimizer.state[p])
    return expected
