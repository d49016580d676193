# SPDX-License-Identifier: Apache-2.0
"""Counts and summarizes the codes of moments."""

import torch
from torch import Tensor

from zero8.spec.codec import MomentCode
from zero8.spec.fp8 import Fp8Code
from zero8.spec.log import SignedLogCode
from zero8.state.store import CHUNK_NUMEL, MomentStore

NUM_CODES = 256
NEGATIVE_ZERO = 128
"""Of `fp8`; other codes do not have it."""


def counts_of(store: MomentStore) -> Tensor:
    """Return how often each code occurs in a moment of one parameter, (256,) int64."""
    (piece,), counts = store.table.pieces, torch.zeros(NUM_CODES, dtype=torch.int64)
    for begin in range(0, piece.numel if piece.is_quantized else 0, CHUNK_NUMEL):
        codes = store.codes_of(0, begin, min(begin + CHUNK_NUMEL, piece.numel))
        counts += torch.bincount(codes, minlength=NUM_CODES)
    return counts


def saturated(code: MomentCode, counts: Tensor) -> dict[str, float]:
    """Return the shares of elements with extreme codes.

    Keys: at_top, of codes of the largest magnitude, of which every block has one; at_floor, of
    those of the smallest magnitude but 0, to which v rounds smaller values up.
    """
    order = order_of_codes(code)
    size = _values_of(code, order).abs()
    total = max(1, int(counts.sum()))
    return {
        name: int(counts[order[size == end]].sum()) / total
        for name, end in (("at_top", size.max()), ("at_floor", size[size > 0].min()))
    }


def summary(store: MomentStore, counts: Tensor) -> dict:
    """Return a summary of a moment of one whole parameter.

    Keys: zeros (share of elements that decode to 0) and, for codes, codes_used (of codes), those of
    `saturated`, zero_blocks (share of blocks whose scale is 0), scale_min and scale_max (extremes
    of the magnitudes of the others; for v in `log`, of the blocks' largest values).
    """
    (piece,) = store.table.pieces
    chunks = range(0, piece.numel, CHUNK_NUMEL)
    reads = (store.read(begin, min(CHUNK_NUMEL, piece.numel - begin)) for begin in chunks)
    zeros = sum(int((values == 0).sum()) for values in reads) / max(1, piece.numel)
    if not piece.is_quantized:
        return {"zeros": zeros}
    code = store.code
    scales = store.scales.view(len(store.scales), -1)[:, 0].abs()
    is_used = scales > 0
    return {
        "zeros": zeros,
        "codes_used": int((counts[order_of_codes(code)] > 0).sum()),
        "codes": 1 << code.bits,
        **saturated(code, counts),
        "zero_blocks": int((~is_used).sum()) / max(1, len(scales)),
        "scale_min": float(scales[is_used].min()) if is_used.any() else 0.0,
        "scale_max": float(scales.max()) if len(scales) else 0.0,
    }


def order_of_codes(code: MomentCode) -> Tensor:
    """Return the valid codes, in ascending order of their values; int64."""
    codes = torch.arange(1 << code.bits, dtype=torch.uint8, device="cpu")
    if isinstance(code, SignedLogCode | Fp8Code):
        codes = codes[[int(c) not in (*code.unused, NEGATIVE_ZERO) for c in codes]]
    return codes[_values_of(code, codes).argsort(stable=True)].to(torch.int64)


def _values_of(code: MomentCode, codes: Tensor) -> Tensor:
    """Return what codes decode to in one block, in which all values differ."""
    scale = torch.ones((len(codes), *code.scale_shape), dtype=torch.float32, device="cpu")
    if code.scale_shape:  # v in `log`: the largest value, and the width of a code
        scale[:, 1] = 2.0**20
    return code.decode(codes.to(torch.uint8), scale, 1.0)
