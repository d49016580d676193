# SPDX-License-Identifier: Apache-2.0
"""Moment codes of other work, re-implemented in plain PyTorch from their descriptions.

A code works on moments cut into blocks, float32 [blocks, block_size], v being the moment itself.
`encode` returns the state tensors, `decode` turns them back into (m, v).  Where a published
package runs on the CPU, `benchmarks.fidelity.schemes` measures the package instead.
"""

import torch
from torch import Tensor

from zero8.spec import dither
from zero8.spec.codec import CODECS, MomentCode, dequantize, quantize
from zero8.spec.grid import BlockGrid


def quantized(
    code: MomentCode, x: Tensor, step: int, settling: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a moment in blocks, rounded as zero8 does at a step."""
    numel, block_size = x.numel(), x.shape[1]
    grid = BlockGrid(1, numel, block_size)
    thresholds = dither.in_blocks(dither.phase_of(0, step), 0, numel, grid)
    blocks = torch.arange(numel) // block_size
    codes, scales = quantize(code, x.reshape(-1), blocks, len(x), thresholds, settling)
    return codes.view(x.shape), scales


def dequantized(code: MomentCode, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the moment that `quantized` made codes and scales of."""
    blocks = torch.arange(codes.numel()) // codes.shape[1]
    return dequantize(code, codes.reshape(-1), scales, blocks).view(codes.shape)


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Return the index of the level nearest to each element, uint8; levels ascend."""
    return torch.bucketize(x, (levels[:-1] + levels[1:]) / 2).to(torch.uint8)


def nearest_of_blocks(x: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes nearest to x over its block's largest magnitude, and these magnitudes."""
    scale = x.abs().amax(1, keepdim=True)
    return nearest(x / scale.clamp(min=1e-38), levels), scale


def four_bit_levels() -> Tensor:
    """Return the 16 levels of a signed 4-bit moment: three decades of 1, 2 and 4 midpoints."""
    entries = [torch.tensor([0.0, 1.0])]
    for decade in range(3):
        edges = torch.linspace(0.1, 1.0, 2**decade + 1)
        midpoints = 10.0 ** (decade - 2) * (edges[:-1] + edges[1:]) / 2
        entries += [midpoints, -midpoints]
    return torch.cat(entries).sort().values


class FlashCode:
    """FlashOptim (arXiv:2602.23349): softsign m, linear sqrt(v), groups of 32, float16 scales.

    m: code = round(127 * 2x/(1+|x|)), x = m/absmax;   v: code = round(255 * sqrt(v)/absmax)
    """

    block_size = 32
    SCALE_FLOOR = 1e-12

    def encode(self, m: Tensor, v: Tensor, step: int) -> dict[str, Tensor]:
        """Return codes and scales of both moments."""
        root = v.sqrt()
        m_scale = m.abs().amax(1, keepdim=True).clamp(min=self.SCALE_FLOOR)
        v_scale = root.amax(1, keepdim=True).clamp(min=self.SCALE_FLOOR)
        x = m / m_scale
        return {
            "m": (127 * 2 * x / (1 + x.abs()) + 0.5).floor().to(torch.int8),
            "m_scale": m_scale.half(),
            "v": (255 * root / v_scale + 0.5).floor().to(torch.uint8),
            "v_scale": v_scale.half(),
        }

    def decode(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the moments."""
        y = state["m"].float() / 127
        m = y / (2 - y.abs()) * state["m_scale"].float()
        return m, (state["v"].float() / 255 * state["v_scale"].float()).square()


class RatioCode:
    """v as in zero8's `log`, and m as the ratio r = m/sqrt(v_q), which Adam keeps bounded.

    r: code = round(127 * r/absmax);  m decodes through the v that is stored beside it.
    """

    block_size = 256

    def __init__(self):
        """Pick the code of v."""
        self._v_code = CODECS["log"].of_unsigned

    def encode(self, m: Tensor, v: Tensor, step: int) -> dict[str, Tensor]:
        """Return codes and scales of both moments."""
        codes, scales = quantized(self._v_code, v, step)
        root = dequantized(self._v_code, codes, scales).sqrt()
        ratio = torch.where(root > 0, m / root, 0.0)
        m_scale = ratio.abs().amax(1, keepdim=True)
        m_codes = torch.where(m_scale > 0, 127 * ratio / m_scale, 0.0).round().to(torch.int8)
        return {"m": m_codes, "m_scale": m_scale, "v": codes, "v_scale": scales}

    def decode(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the moments."""
        v = dequantized(self._v_code, state["v"], state["v_scale"])
        return state["m"].float() / 127 * state["m_scale"] * v.sqrt(), v


class FourBitCode:
    """4-bit states (Li et al., arXiv:2309.01507): m dynamic exponent, v linear without zero.

    Both in flat blocks of 128, nearest level, two codes to a byte; the paper's rank-1 scales of v
    are left out.
    """

    block_size = 128

    def __init__(self):
        """Make the levels: those of `four_bit_levels` for m, i/16 for v."""
        self._m_levels = four_bit_levels()
        self._v_levels = torch.arange(1, 17) / 16

    def encode(self, m: Tensor, v: Tensor, step: int) -> dict[str, Tensor]:
        """Return packed codes and scales of both moments."""
        m_packed, m_scale = _encoded(m, self._m_levels)
        v_packed, v_scale = _encoded(v, self._v_levels)
        return {"m": m_packed, "m_scale": m_scale, "v": v_packed, "v_scale": v_scale}

    def decode(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the moments."""
        m = self._m_levels[_unpacked(state["m"])] * state["m_scale"]
        return m, self._v_levels[_unpacked(state["v"])] * state["v_scale"]


def _encoded(x: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest codes, two to a byte, and the scales."""
    codes, scale = nearest_of_blocks(x, levels)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale


def _unpacked(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1).long()


class CodedAdam(torch.optim.Optimizer):
    """Adam in plain PyTorch, float32, whose moments are kept in one of the codes above.

    The sizes of the parameters must be multiples of the code's block size; where that is None, a
    parameter is one block.
    """

    def __init__(self, params, code, lr: float, betas: tuple[float, float], eps: float = 1e-8):
        """Keep the code; states are made by the first step."""
        self._code = code
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def moments(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored m and v of a parameter, [blocks, block_size]."""
        if not self.state[p]:
            zeros = torch.zeros(p.numel()).view(-1, self._code.block_size or p.numel())
            return zeros, zeros.clone()
        return self._code.decode(self.state[p]["codes"])

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Decode, step as Adam does, encode."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m, v = self.moments(p)
                grad = p.grad.view_as(m)
                step = self.state[p].get("step", 0) + 1
                m.lerp_(grad, 1 - beta1)
                v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denominator = (v / (1 - beta2**step)).sqrt() + group["eps"]
                update = m / (1 - beta1**step) / denominator
                p.sub_(group["lr"] * update.view_as(p))
                self.state[p] = {"step": step, "codes": self._code.encode(m, v, step)}
