# SPDX-License-Identifier: Apache-2.0
"""The states of Muon's momentum that are compared: zero8's of SGD, and codes of other work.

Muon keeps m' = mu m + (1 - mu) g and takes the update u = (1 - mu) g + mu m'.  The optimizers here
keep m' over 1 - mu, as SGD does, and their updates are u over 1 - mu: scales of blocks are
proportional to their elements, so that codes, relative errors and orthogonalized updates are the
same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.fidelity.codes import four_bit_levels, nearest_of_blocks
from benchmarks.fidelity.schemes import FP32_CONTROL, Named, Scheme
from benchmarks.momentum.recorded import sgd


@dataclass(frozen=True, eq=False)
class LevelCode:
    """Elements over the largest magnitude of their block, to the nearest of some levels.

    Blocks run through rows laid end to end.

    Attributes:
        levels: ascending, at most 256; the largest is 1.
        block_size: elements per block, which the size of a moment must be a multiple of.
    """

    levels: Tensor
    block_size: int

    def encode(self, moment: Tensor) -> dict[str, Tensor]:
        """Return the codes, uint8 [blocks, block_size], and the scales, float32 [blocks, 1]."""
        codes, scales = nearest_of_blocks(moment.reshape(-1, self.block_size), self.levels)
        return {"codes": codes, "scales": scales}

    def decode(self, state: dict[str, Tensor]) -> Tensor:
        """Return the moment, float32 [blocks, block_size]."""
        codes = state["codes"]
        values = self.levels.index_select(0, codes.flatten().int())
        return values.view(codes.shape) * state["scales"]


class Bfloat16Code:
    """A moment of 2 bytes, the nearest bfloat16."""

    block_size = None

    def encode(self, moment: Tensor) -> dict[str, Tensor]:
        """Return the moment in bfloat16."""
        return {"moment": moment.bfloat16()}

    def decode(self, state: dict[str, Tensor]) -> Tensor:
        """Return the moment, float32."""
        return state["moment"].float()


def linear_levels(largest_code: int) -> Tensor:
    """Return the levels of signed integers up to `largest_code` over that number."""
    return torch.arange(-largest_code, largest_code + 1) / largest_code


CODES = {
    "bf16": Bfloat16Code(),
    "int8": LevelCode(linear_levels(127), 2048),  # arXiv:2509.23106
    "4bit": LevelCode(four_bit_levels(), 128),  # torchao's, from arXiv:2309.01507
    "4bit_linear": LevelCode(linear_levels(7), 128),
}
STATES = (FP32_CONTROL, "log", "dynamic", *CODES)


class CodedMomentum(Optimizer):
    """SGD with Nesterov's momentum in plain PyTorch, whose moment is kept in one of the codes.

    m' = momentum*m + g,   u = g + momentum*m',   p' = p - lr*u
    """

    def __init__(self, params, code: LevelCode | Bfloat16Code, lr: float, momentum: float):
        """Keep the code; states are made by the first step."""
        self._code = code
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Decode, step, encode."""
        for group in self.param_groups:
            momentum = group["momentum"]
            for p in group["params"]:
                moment = p.grad.clone()
                if self.state[p]:
                    stored = self._code.decode(self.state[p])
                    moment.add_(stored.view(p.shape), alpha=momentum)
                p.sub_(group["lr"] * p.grad.add(moment, alpha=momentum))
                self.state[p] = self._code.encode(moment)


def nesterov(states: str) -> Scheme:
    """Return Nesterov's momentum in one of `STATES`, whose update at lr 1 is Muon's over 1 - mu."""
    if states not in CODES:
        return sgd(states, nesterov=True)
    code = CODES[states]

    def make(named: Named, betas: tuple[float, float]) -> Optimizer:
        return CodedMomentum([p for _, p in named], code, lr=1.0, momentum=betas[0])

    return Scheme(states, make, None, code.block_size, "reimplemented")
