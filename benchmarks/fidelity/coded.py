# SPDX-License-Identifier: Apache-2.0
"""Adam in plain PyTorch on moments that are kept in codes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fidelity.training import LEAST_NUMEL
from zero8.spec.reference import stochastic_bfloat16

EPS = 1e-8
Named = list[tuple[str, nn.Parameter]]
Stored = list[Tensor]
"""Codes, and the scales of their blocks."""
WHOLE = 0
"""The size of a block that is a whole tensor."""


def adam_update(m: Tensor, v: Tensor, step: int, betas: tuple[float, float]) -> Tensor:
    """Return u = mhat / (sqrt(vhat) + eps) at a step, counted from 1."""
    denominator = (v / (1 - betas[1] ** step)).sqrt() + EPS
    return m / (1 - betas[0] ** step) / denominator


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return the bytes of codes of 4 or 2 bits, (numel,) uint8; the first has the lowest bits."""
    of_byte = codes.view(-1, 8 // bits).unbind(1)
    stored = of_byte[0].clone()
    for place, code in enumerate(of_byte[1:], 1):
        stored |= code << place * bits
    return stored


def unpacked(stored: Tensor, bits: int) -> Tensor:
    """Return the codes that bytes hold, (numel,) int32."""
    shifts = range(0, 8, bits)
    return torch.stack([stored >> s & (1 << bits) - 1 for s in shifts], 1).view(-1).int()


@dataclass(frozen=True)
class Code:
    """A code of one moment.

    Attributes:
        encode: returns codes of x, (blocks, block_size) float32, and scales, the first of which has
            a row per block; gets x and the number of the step.
        decode: turns these back.
        block_size: of blocks that lie end to end, or `WHOLE`; None: the rows of a matrix.
        bits: of a code; less than 8 are packed.
    """

    encode: Callable[[Tensor, int], Stored]
    decode: Callable[..., Tensor]
    block_size: int | None = None
    bits: int = 8

    def stored(self, x: Tensor, step: int) -> Stored:
        """Return what is kept of a moment."""
        is_by_row = self.block_size is None
        blocks = x.flatten(1) if is_by_row else x.reshape(-1, self.block_size or x.numel())
        codes, *scales = self.encode(blocks, step)
        return [codes if self.bits == 8 else packed(codes.flatten().byte(), self.bits), *scales]

    def codes(self, stored: Stored) -> Tensor:
        """Return the codes in blocks."""
        if self.bits == 8:
            return stored[0]
        return unpacked(stored[0], self.bits).view(len(stored[1]), -1)

    def read(self, stored: Stored) -> Tensor:
        """Return the moment in blocks."""
        return self.decode(self.codes(stored), *stored[1:])


@dataclass(frozen=True)
class Pair:
    """The codes of both of Adam's moments."""

    m: Code
    v: Code

    def encode(self, m: Tensor, v: Tensor, step: int) -> dict[str, Stored]:
        """Return what is kept of both moments."""
        return {"m": self.m.stored(m, step), "v": self.v.stored(v, step)}

    def decode(self, state: dict[str, Stored]) -> tuple[Tensor, Tensor]:
        """Return the moments in blocks."""
        return self.m.read(state["m"]), self.v.read(state["v"])


FLOAT32 = Code(lambda x, step: [x.clone()], lambda x: x.clone(), 1)


class CodedAdam(torch.optim.Optimizer):
    """AdamW in plain PyTorch, float32, whose moments are kept in codes.

    Parameters of fewer than `LEAST_NUMEL` elements keep float32 moments.  bfloat16 parameters are
    rounded stochastically.
    """

    def __init__(
        self,
        code: Pair,
        algorithm: str,
        named: Named,
        keywords: dict[str, Any],
        period: int | None = None,
        beta1: float | None = None,
    ):
        """Keep the code.

        After `period` steps the state of a parameter starts anew; `beta1` is taken instead of that
        in the keywords.  What is between is what `benchmarks.fidelity.schemes.Scheme` gives.
        """
        self._code, self._period, self._beta1 = code, period, beta1
        super().__init__([p for _, p in named], keywords)

    def code_of(self, p: Tensor) -> Pair:
        """Return the code of a parameter."""
        return self._code if p.numel() >= LEAST_NUMEL else Pair(FLOAT32, FLOAT32)

    def moments(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored m and v of a parameter, in its shape."""
        if not self.state[p]:
            return torch.zeros(p.shape), torch.zeros(p.shape)
        m, v = self.code_of(p).decode(self.state[p]["codes"])
        return m.view_as(p), v.view_as(p)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Step all parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                self.step_one(p, group)

    def step_one(self, p: Tensor, group: dict[str, Any]) -> None:
        """Decode, step as AdamW does, encode."""
        if self.state[p].get("step") == self._period:
            self.state[p] = {}
        betas = self._beta1 or group["betas"][0], group["betas"][1]
        (m, v), grad, step = self.moments(p), p.grad.float(), self.state[p].get("step", 0) + 1
        m.lerp_(grad, 1 - betas[0])
        v.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
        decayed = p.float() * (1 - group["lr"] * group["weight_decay"])
        write(p, decayed - group["lr"] * adam_update(m, v, step, betas), step)
        self.state[p] = {"step": step, "codes": self.code_of(p).encode(m, v, step)}


def random_of(x: Tensor, step: int) -> Tensor:
    """Return random numbers from 0 to below 1 of the shape of x, a function of it and the step."""
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(step))


def to_bfloat16(x: Tensor, step: int) -> Tensor:
    """Return x rounded stochastically to bfloat16."""
    return stochastic_bfloat16(x, (random_of(x, step) * 65536).long())


def write(p: Tensor, x: Tensor, step: int) -> None:
    """Set a parameter to x, rounded stochastically if it is bfloat16."""
    p.copy_(x if p.dtype == torch.float32 else to_bfloat16(x, step))
