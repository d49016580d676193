# SPDX-License-Identifier: Apache-2.0
"""A model that Muon steps on known gradients, in one process and on ranks, and what came of it."""

import torch
from fsdp_worker import Weights, whole
from torch import Tensor, nn

import zero8
from zero8.optimizer.muon import Muon8bitBlockwise

# Six ranks' partitions of Muon's parameters, of AdamW's, and of each alone have whole blocks of
# 256.  Rows of FSDP2 are ragged, and one rank of three has none of "pair".  In ZeRO-3 two ranks and
# three have some experts whole, and parts of others.
SHAPES = {
    "a": (18, 256),
    "b": (12, 512),
    "pair": (2, 6, 256),
    "experts": (5, 6, 256),
    "conv": (6, 16, 4, 4),
    "embed": (12, 256),
    "bias": (1536,),
}
MATRICES = ("a", "b", "pair", "experts", "conv")
LATE = "b"
"""It has no gradient in the first step."""
LR, MOMENTUM = 1e-3, 0.9
OPTIONS = {
    "lr": LR,
    "momentum": MOMENTUM,
    "ns_dtype": "float32",
    "weight_decay": 0.1,
    "min_8bit_size": 1,
}
STEPS = 3


class Known(Weights):
    """Its gradients are exact also where each rank's is divided before they are added."""

    SHAPES = SHAPES

    def gradient(self, name: str, step: int) -> Tensor:
        return 3 * super().gradient(name, step)


def optimizer_of(model: nn.Module, params=None, **options) -> Muon8bitBlockwise:
    params = model.named_parameters() if params is None else params
    return Muon8bitBlockwise(params, **{**OPTIONS, **options})


def alone(steps: int = STEPS, late: str = "") -> dict[str, dict]:
    """Return by parameter its values and its moments in float32 after steps of one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have
    try:
        model = Known()
        optimizer = optimizer_of(model)
        for step in range(steps):
            model(step, late if step == 0 else "").backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_num_threads(threads)
    return results(model, optimizer)


def results(model, optimizer) -> dict[str, dict]:
    """Return by parameter its values and its moments in float32, whole."""
    states = zero8.export(optimizer)["state"]
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    values = dict(model.named_parameters())
    found = {}
    for number, name in enumerate(names):
        moments = [
            whole(states[number][key])
            for key in ("momentum_buffer", "exp_avg", "exp_avg_sq")
            if key in states[number]
        ]
        found[name] = {"values": whole(values[name].detach()), "moments": moments}
    return found


def wrong(got: dict[str, dict], expected: dict[str, dict]) -> list[str]:
    """Return what has not the bits of one process.

    Moments have them as no block is cut.  So updates are equal before they are orthogonalized; the
    shapes differ, so each matrix is orthogonalized by itself here and there, by the same calls on
    one thread, on memory that torch aligns.  AdamW's parameters have the same gradients.
    """
    found = []
    for name, entries in expected.items():
        ours = got[name]
        pairs = zip(ours["moments"], entries["moments"], strict=True)
        if not all(torch.equal(x, y) for x, y in pairs):
            found.append(f"{name}: moments")
        if not torch.equal(ours["values"], entries["values"]):
            distance = (ours["values"] - entries["values"]).abs().max().item()
            found.append(f"{name}: {distance} apart")
    return found
