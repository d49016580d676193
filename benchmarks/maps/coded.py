# SPDX-License-Identifier: Apache-2.0
"""Adam in plain PyTorch on the codes of the maps."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.fidelity.schemes import Named
from benchmarks.maps.codes import LogCode, MapCode

EPS = 1e-8


def adam_update(m: Tensor, v: Tensor, step: int, betas: tuple[float, float]) -> Tensor:
    """Return u = mhat / (sqrt(vhat) + eps) at a step, counted from 1."""
    denominator = (v / (1 - betas[1] ** step)).sqrt() + EPS
    return m / (1 - betas[0] ** step) / denominator


class CodedAdam(torch.optim.Optimizer):
    """AdamW in plain PyTorch, float32, whose moments are kept in one of `benchmarks.maps.codes`.

    The sizes of the parameters must be multiples of the code's block size; where that is None, a
    parameter is one block.
    """

    def __init__(
        self, code: MapCode | LogCode, algorithm: str, named: Named, keywords: dict[str, Any]
    ):
        """Keep the code; what follows is what `benchmarks.fidelity.schemes.Scheme` gives."""
        self._code = code
        super().__init__([p for _, p in named], keywords)

    def moments(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored m and v of a parameter, [blocks, block_size]."""
        if not self.state[p]:
            zeros = torch.zeros(p.numel()).view(-1, self._code.block_size or p.numel())
            return zeros, zeros.clone()
        return self._code.decode(self.state[p]["codes"])

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Decode, step as AdamW does, encode."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m, v = self.moments(p)
                grad = p.grad.view_as(m)
                step = self.state[p].get("step", 0) + 1
                m.lerp_(grad, 1 - beta1)
                v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * adam_update(m, v, step, group["betas"]).view_as(p))
                self.state[p] = {"step": step, "codes": self._code.encode(m, v, step)}
