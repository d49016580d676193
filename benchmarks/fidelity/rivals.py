# SPDX-License-Identifier: Apache-2.0
"""The states of papers of 2023 to 2026, from their formulas.

Unless said otherwise, scales are float32, and codes round to nearest.  Blocks lie end to end.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fidelity.coded import (
    FLOAT32,
    Code,
    CodedAdam,
    Named,
    Pair,
    Stored,
    packed,
    random_of,
    to_bfloat16,
    unpacked,
)
from zero8.optimizer.muon import ADAM_PARAMS
from zero8.spec.linear4 import linear4_code
from zero8.spec.muon import lr_ratio
from zero8.spec.newton_schulz import orthogonalized

TINY = 2.0**-126
LARGEST_E4M3 = 448.0


def largest(x: Tensor) -> Tensor:
    """Return the largest |x| of each block, at least the smallest normal number, (blocks, 1)."""
    return x.abs().amax(1, keepdim=True).clamp(min=TINY)


def of_levels(levels: Tensor, block_size: int, bits: int) -> Code:
    """Return the code of the nearest of ascending levels, times the block's largest |x|."""

    def encode(x: Tensor, step: int) -> Stored:
        scale = largest(x)
        scaled, codes = x / scale, torch.zeros(x.shape, dtype=torch.uint8)
        for middle in (levels[:-1] + levels[1:]) / 2:  # faster than a search where they are few
            codes += scaled > middle
        return [codes, scale]

    return Code(encode, lambda codes, scale: levels.take(codes.long()) * scale, block_size, bits)


def rank_1(x: Tensor, step: int) -> Stored:
    """Return 4-bit codes of x: 16ths, 1 to 16, of the smaller of a row's and a column's largest."""
    rows, columns = largest(x), largest(x.T).T
    return [(x / rows.minimum(columns) * 16).round().clamp(1, 16) - 1, rows, columns]


def unranked(codes: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return what `rank_1` encoded."""
    return (codes + 1) / 16 * rows.minimum(columns)


def powers(x: Tensor, step: int) -> Stored:
    """Return SOLO's 2-bit codes of v in blocks of 128, rounded stochastically.

    x = scale * a^code,  a = (x_p / scale)^(1/3),  x_p: the block's quantile of 0.1
    """
    scale, low = largest(x), x.topk(14, largest=False).values
    quantile = low[:, 12:13].lerp(low[:, 13:], 0.7)  # 127 * 0.1 is 12.7
    base = (quantile / scale).clamp(1e-30, 1 - 1e-6).pow(1 / 3)
    place = (x / scale).log2() / base.log2() + random_of(x, step) - 0.5
    return [place.round().clamp(0, 3), scale, base]


def e4m3(x: Tensor, step: int) -> Stored:
    """Return FP8 codes and scales; the largest |x| of a block is the largest FP8 number."""
    scale = largest(x) / LARGEST_E4M3
    return [(x / scale).to(torch.float8_e4m3fn), scale]


def expanded(x: Tensor, step: int) -> Stored:
    """Return COAT's codes: E4M3 of |x / c|^k, which stretches the block's range over FP8's.

    c = sqrt(largest * smallest),  k = log(448^2/2) / log(largest / smallest), down to sixteenths

    The smallest is that of nonzero elements; 1e-30 is added to both.
    """
    top, nonzero = largest(x) + 1e-30, torch.where(x == 0, torch.inf, x.abs())
    bottom = (nonzero.amin(1, keepdim=True) + 1e-30).minimum(top)
    center = top.sqrt() * bottom.sqrt()
    octaves = (top.log2() - bottom.log2()).clamp(min=2**-20)
    k = (math.log2(LARGEST_E4M3**2 / 2) / octaves * 16).floor().clamp(1, 1024) / 16
    codes, scale = e4m3(x.sign() * (x.abs() / center) ** k, step)
    return [codes, scale, k, center]


def contracted(codes: Tensor, scale: Tensor, k: Tensor, center: Tensor) -> Tensor:
    """Return what `expanded` encoded."""
    x = codes.float() * scale
    return x.sign() * x.abs() ** (1 / k) * center


def flash(signed: bool) -> Code:
    """Return FlashOptim's code: softsign of m, 2x/(1 + |x|), or sqrt(v), in equal steps.

    Scales are float16.
    """

    def encode(x: Tensor, step: int) -> Stored:
        root = x if signed else x.sqrt()
        scale = root.abs().amax(1, keepdim=True).clamp(min=1e-12)
        y = root / scale
        y = 2 * y / (1 + y.abs()) * 127 if signed else y * 255
        return [(y + 0.5).floor().to(torch.int8 if signed else torch.uint8), scale.half()]

    def decode(codes: Tensor, scale: Tensor) -> Tensor:
        y = codes.float() / (127 if signed else 255)
        return y / (2 - y.abs()) * scale.float() if signed else (y * scale.float()).square()

    return Code(encode, decode, 32)


FP8 = Code(e4m3, lambda codes, scale: codes.float() * scale, 128)
COAT = Code(expanded, contracted, 128)
BF16 = Code(lambda x, step: [x.bfloat16()], lambda x: x.float(), 1)
STOCHASTIC_BF16 = replace(BF16, encode=lambda x, step: [to_bfloat16(x, step)])
DYNAMIC_4 = of_levels(linear4_code(signed=True).entries, 128, 4)
DYNAMIC_2 = of_levels(torch.tensor([-0.55, 0.0, 0.55, 1.0]), 128, 2)
POWERS = Code(powers, lambda codes, scale, base: scale * base**codes, 128, 2)
LI = Pair(DYNAMIC_4, Code(rank_1, unranked, bits=4))

ADAM_RIVALS: dict[str, Callable[..., CodedAdam]] = {
    "COAT": partial(CodedAdam, Pair(COAT, COAT)),
    "FP8, groups of 128": partial(CodedAdam, Pair(FP8, FP8)),
    "FP8, resets": partial(CodedAdam, Pair(FP8, FP8), period=300),
    "FlashOptim": partial(CodedAdam, Pair(flash(True), flash(False))),
    "4 bits, rank 1": partial(CodedAdam, LI),
    "4 bits, rank 1, resets": partial(CodedAdam, LI, period=200),
    "SOLO, 4 + 2 bits": partial(CodedAdam, Pair(DYNAMIC_4, POWERS)),
    "SOLO, 4 + 2 bits, its beta1": partial(CodedAdam, Pair(DYNAMIC_4, POWERS), beta1=0.8),
    "SOLO, 2 + 2 bits": partial(CodedAdam, Pair(DYNAMIC_2, POWERS)),
    "bf16, stochastic weights": partial(CodedAdam, Pair(BF16, BF16)),
    "bf16, all stochastic": partial(CodedAdam, Pair(STOCHASTIC_BF16, STOCHASTIC_BF16)),
}
"""Optimizers of AdamW's states in papers."""


def companded(x: Tensor, dim: tuple[int, ...]) -> Stored:
    """Return MuonQ's codes, 4 bits: sign(x) ln(1 + 255|x|) / ln(256) in equal steps.

    A scale, float16, serves all elements along `dim`.
    """
    y = x.sign() * (255 * x.abs()).log1p() / math.log(256)
    scale = (y.abs().amax(dim, keepdim=True) / 7).clamp(min=1e-8)
    codes = (y / scale).round().clamp(-8, 7) + 8
    return [packed(codes.flatten().byte(), 4), scale.half()]


def uncompanded(stored: Stored, rows: int) -> Tensor:
    """Return what `companded` encoded, a matrix of so many rows."""
    y = (unpacked(stored[0], 4) - 8).view(rows, -1) * stored[1].float()
    return y.sign() * (y.abs() * math.log(256)).expm1() / 255


class MuonQ(CodedAdam):
    """Muon whose momentum B has a Frobenius norm of 1 and is kept as P R^T + rest, in 4 bits.

        B = normalized(momentum * B + normalized(g)),  P = the orthogonal factor of B R,  R = B^T P

    The columns of R, here of the last step and scaled to 1, are 1/16 of the matrix's smaller side.
    The update is that of `zero8.spec.muon`; AdamW's parameters keep float32 moments.
    """

    def __init__(self, quantized: bool, algorithm: str, named: Named, keywords: dict[str, Any]):
        """Look for the matrices; without `quantized`, momentum is float32."""
        super().__init__(Pair(FLOAT32, FLOAT32), algorithm, named, keywords)
        self._quantized = quantized
        self._matrices = {
            p for n, p in named if p.dim() > 1 and not any(fnmatchcase(n, a) for a in ADAM_PARAMS)
        }

    def step_one(self, p: Tensor, group: dict[str, Any]) -> None:
        """Step a matrix as Muon does, and all else as AdamW."""
        if p not in self._matrices:
            return super().step_one(p, group)
        grad = p.grad.flatten(1)
        grad = grad / (grad.norm() + 1e-7)
        momentum = self._momentum(p) * group["momentum"] + grad
        momentum /= momentum.norm() + 1e-7
        self._keep(p, momentum)
        update = orthogonalized((grad + group["momentum"] * momentum)[None])[0]
        ratio = lr_ratio("match_rms_adamw", *grad.shape)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * ratio * update.view_as(p))

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            return torch.zeros(p.flatten(1).shape)
        if not self._quantized:
            return state["momentum"]
        return uncompanded(state["rest"], len(p)) + self._left(p) @ self._right(p).T

    def _left(self, p: Tensor) -> Tensor:
        return uncompanded(self.state[p]["left"], len(p))

    def _right(self, p: Tensor) -> Tensor:
        if not self.state[p]:
            rows, columns = p.flatten(1).shape
            shape = torch.empty(columns, max(1, min(rows, columns) // 16))
            return random_of(shape, 0) - 0.5
        return uncompanded(self.state[p]["right"], p[0].numel())

    def _keep(self, p: Tensor, momentum: Tensor) -> None:
        if not self._quantized:
            self.state[p] = {"momentum": momentum}
            return
        right = self._right(p)
        left, _ = torch.linalg.qr(momentum @ (right / (right.norm(dim=0) + 1e-7)))
        right = momentum.T @ left
        self.state[p] = {
            "rest": companded(momentum - left @ right.T, (0, 1)),
            "left": companded(left, (0,)),
            "right": companded(right, (0,)),
        }


MUON_RIVALS: dict[str, Callable[..., CodedAdam]] = {
    "MuonQ, 4 bits": partial(MuonQ, True),
    "MuonQ, float32": partial(MuonQ, False),
}
"""Optimizers of Muon's momentum in papers."""
