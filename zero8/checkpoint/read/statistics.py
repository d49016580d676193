# SPDX-License-Identifier: Apache-2.0
"""Counts and summarizes the codes of moments."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero8.spec.codec import MomentCode, has_zero
from zero8.spec.fp8 import Fp8Code
from zero8.spec.log import SignedLogCode
from zero8.state.store import MomentStore

NUM_CODES = 256
_CHUNK_NUMEL = 1 << 22


@dataclass
class MomentCounts:
    """Counts of one moment of a parameter.

    Attributes:
        codes: (256,) int64, number of elements with each code.
        scale_min, scale_max: extremes of the magnitudes of nonzero scales (for v in `log`, of the
            blocks' largest values).
        zero_blocks, num_blocks: number of blocks whose scale is 0, and of all blocks.
        values: number of elements kept in float32.
        zeros: number of those that are 0, or that have codes without 0 in blocks of zeros.
    """

    codes: Tensor = field(
        default_factory=lambda: torch.zeros(NUM_CODES, dtype=torch.int64, device="cpu")
    )
    scale_min: float = float("inf")
    scale_max: float = 0.0
    zero_blocks: int = 0
    num_blocks: int = 0
    values: int = 0
    zeros: int = 0

    @classmethod
    def of(cls, store: MomentStore) -> "MomentCounts":
        """Count one fragment's moment."""
        counts = cls()
        counts.values = store.dense.numel()
        counts.zeros = int((store.dense == 0).sum())
        for number, piece in enumerate(store.table.pieces):
            for begin in range(0, piece.numel if piece.is_quantized else 0, _CHUNK_NUMEL):
                codes = store.codes_of(number, begin, min(begin + _CHUNK_NUMEL, piece.numel))
                counts.codes += torch.bincount(codes, minlength=NUM_CODES)
                if not has_zero(store.code):
                    counts.zeros += _numel_of_zero_blocks(store, number, begin, len(codes))
        if store.scales.numel():
            scales = store.scales.view(len(store.scales), -1)[:, 0].abs()
            used = scales[scales > 0]
            counts.num_blocks, counts.zero_blocks = len(scales), len(scales) - len(used)
            if len(used):
                counts.scale_min, counts.scale_max = float(used.min()), float(used.max())
        return counts

    def add(self, other: "MomentCounts") -> None:
        """Add other counts."""
        self.codes += other.codes
        self.scale_min = min(self.scale_min, other.scale_min)
        self.scale_max = max(self.scale_max, other.scale_max)
        self.zero_blocks += other.zero_blocks
        self.num_blocks += other.num_blocks
        self.values += other.values
        self.zeros += other.zeros

    def summary(self, code: MomentCode | None) -> dict:
        """Return a summary; `code` is None for float32 moments.

        Keys: zeros (share of elements that decode to 0) and, for codes, codes_used (of codes),
        at_top (share of elements with the code of largest magnitude; every block has one), at_floor
        (share with the codes of smallest magnitude but 0; v rounds smaller values up to it),
        zero_blocks (share), scale_min, scale_max.
        """
        if code is None:
            return {"zeros": self.zeros / max(1, self.values)}
        total = max(1, int(self.codes.sum()))
        used, top, floor = _places(code)
        return {
            "zeros": (int(self.codes[code.zero_code]) if has_zero(code) else self.zeros) / total,
            "codes_used": int((self.codes[used] > 0).sum()),
            "codes": 1 << code.bits,
            "at_top": int(self.codes[top].sum()) / total,
            "at_floor": int(self.codes[floor].sum()) / total,
            "zero_blocks": self.zero_blocks / max(1, self.num_blocks),
            "scale_min": self.scale_min if self.scale_max else 0.0,
            "scale_max": self.scale_max,
        }


def order_of_codes(code: MomentCode) -> Tensor:
    """Return the valid codes, in ascending order of their values; int64."""
    codes = torch.arange(1 << code.bits, dtype=torch.uint8, device="cpu")
    if isinstance(code, SignedLogCode):  # -128, or -32 of 6 bits, is invalid
        codes = codes[codes != 1 << code.bits - 1]
    if isinstance(code, Fp8Code):  # 127 is NaN, 128 is -0
        codes = codes[
            (codes & 127 <= code.largest) & (codes != 128) & (code.signed | (codes < 128))
        ]
    scale = torch.ones((len(codes), *code.scale_shape), dtype=torch.float32, device="cpu")
    if code.scale_shape:  # v in `log`: the largest value, and the width of a code
        scale[:, 1] = 2.0**20
    return codes.to(torch.int64)[code.decode(codes, scale, 1.0).argsort(stable=True)]


def _places(code: MomentCode) -> tuple[Tensor, Tensor, Tensor]:
    """Return the valid codes, those of largest, and those of smallest nonzero magnitude."""
    order = order_of_codes(code)
    if not has_zero(code):
        return order, order[[-1]], order[[0]]
    zero = int((order == code.zero_code).nonzero())
    if code.signed:
        return order, order[[0, -1]], order[[zero - 1, zero + 1]]
    return order, order[[-1]], order[[zero + 1]]


def _numel_of_zero_blocks(store: MomentStore, number: int, begin: int, numel: int) -> int:
    piece = store.table.pieces[number]
    first = piece.first + begin
    block, _ = piece.grid.block_numbers(first, numel)
    skipped = piece.grid.block_of(first) - piece.grid.block_of(piece.first)
    return int((store.piece(number).scales[block + skipped] == 0).sum())
