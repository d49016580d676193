# SPDX-License-Identifier: Apache-2.0
"""The second moments that optimizers keep, as values and as codes."""

import torch
from torch import Tensor
from torch.optim import Optimizer

import zero8
from benchmarks.fidelity.coded import CodedAdam
from benchmarks.fidelity.training import flat
from zero8.spec.grid import BlockGrid
from zero8.spec.packing import unpacked


def second_moments(optimizer: Optimizer) -> tuple[Tensor, Tensor]:
    """Return all stored v of an Adam, float32, and their codes, flat."""
    pairs = [_second_moment(optimizer, p) for g in optimizer.param_groups for p in g["params"]]
    values, codes = zip(*pairs, strict=True)
    return flat(values), flat(codes)


def _second_moment(optimizer: Optimizer, p: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(optimizer, zero8.Adam8bitBlockwise):
        store = optimizer.moments(p)[1]
        values = store.read(0, p.numel())
        if store.codec is None:
            return values, values
        grid = BlockGrid.of(tuple(p.shape), 256)
        return values, unpacked(store.codes, grid, 0, p.numel(), store.code.bits)
    state = optimizer.state[p]
    if isinstance(optimizer, CodedAdam):
        codes = optimizer.code_of(p).v.codes(state["codes"]["v"])
        return optimizer.moments(p)[1], codes.view(torch.uint8) if codes.itemsize == 1 else codes
    if "state2" in state:  # of bitsandbytes
        codes, scales = state["state2"], state["absmax2"]
        return state["qmap2"][codes.long()].view(-1, 256) * scales[:, None], codes
    v = state["exp_avg_sq"]
    if hasattr(v, "dequantize") and hasattr(v, "codes"):  # of torchao
        return v.dequantize(), v.codes
    return v.float(), v
