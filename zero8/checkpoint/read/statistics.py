# SPDX-License-Identifier: Apache-2.0
"""How the codes of a moment are used: counted over fragments, summed up for people."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero8.spec.codec import MomentCode
from zero8.spec.log import SignedLogCode
from zero8.state.store import MomentStore

NUM_CODES = 256
_CHUNK_NUMEL = 1 << 22


@dataclass
class MomentCounts:
    """What is counted of one moment of a parameter.

    Attributes:
        codes: (256,) int64, how many elements have each code.
        scale_min, scale_max: of the magnitudes of scales other than 0 (of v in `log`, the blocks'
            largest values).
        zero_blocks, num_blocks: blocks whose scale is 0, and all.
        values: number of elements in float32, which have no codes.
        zeros: how many of those are 0.
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
        for chunk in store.codes.split(_CHUNK_NUMEL):
            counts.codes += torch.bincount(chunk, minlength=NUM_CODES)
        if store.scales.numel():
            scales = store.scales.view(len(store.scales), -1)[:, 0].abs()
            used = scales[scales > 0]
            counts.num_blocks, counts.zero_blocks = len(scales), len(scales) - len(used)
            if len(used):
                counts.scale_min, counts.scale_max = float(used.min()), float(used.max())
        return counts

    def add(self, other: "MomentCounts") -> None:
        """Add what was counted elsewhere."""
        self.codes += other.codes
        self.scale_min = min(self.scale_min, other.scale_min)
        self.scale_max = max(self.scale_max, other.scale_max)
        self.zero_blocks += other.zero_blocks
        self.num_blocks += other.num_blocks
        self.values += other.values
        self.zeros += other.zeros

    def summary(self, code: MomentCode | None) -> dict:
        """Return numbers for people and programs; `code` is None for float32 moments.

        Keys: zeros (share of elements that decode to 0) and, of codes, codes_used (of 256), at_top
        (share of elements at the code of largest magnitude: each block has one or more), at_floor
        (v: at the smallest code that is not 0, where what is smaller is raised to; m: at +-1),
        zero_blocks (share), scale_min, scale_max.
        """
        if code is None:
            return {"zeros": self.zeros / max(1, self.values)}
        total = max(1, int(self.codes.sum()))
        used, top, floor = _places(code)
        return {
            "zeros": int(self.codes[code.zero_code]) / total,
            "codes_used": int((self.codes[used] > 0).sum()),
            "at_top": int(self.codes[top].sum()) / total,
            "at_floor": int(self.codes[floor].sum()) / total,
            "zero_blocks": self.zero_blocks / max(1, self.num_blocks),
            "scale_min": self.scale_min if self.scale_max else 0.0,
            "scale_max": self.scale_max,
        }


def order_of_codes(code: MomentCode) -> Tensor:
    """Return the codes that there are by the numbers they stand for, ascending; int64."""
    codes = torch.arange(NUM_CODES, dtype=torch.uint8, device="cpu")
    if isinstance(code, SignedLogCode):  # -128 stands for nothing
        codes = codes[codes != 128]
    scale = torch.ones((len(codes), *code.scale_shape), dtype=torch.float32, device="cpu")
    if code.scale_shape:  # of v in `log`: the largest value, and the width of a code
        scale[:, 1] = 2.0**20
    return codes.to(torch.int64)[code.decode(codes, scale, 1.0).argsort(stable=True)]


def _places(code: MomentCode) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes there are, those of largest, and those of smallest magnitude but 0."""
    order = order_of_codes(code)
    zero = int((order == code.zero_code).nonzero())
    if code.signed:
        return order, order[[0, -1]], order[[zero - 1, zero + 1]]
    return order, order[[-1]], order[[zero + 1]]


def counts_of(stores: tuple[MomentStore, ...]) -> dict[str, MomentCounts]:
    """Count the moments of a fragment, by name."""
    return {store.name: MomentCounts.of(store) for store in stores}
